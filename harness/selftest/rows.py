"""What a selftest says, row by row."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Figures:
    """What one side says of a stream; None where it does not apply or cannot be known."""

    is_usable: bool
    tokens: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    step_ms: float | None = None
    void_reason: str | None = None


@dataclass(frozen=True)
class CaseRow:
    """One case: truth, measured, verdict."""

    case: str
    says: str
    threads: str
    truth: Figures
    measured: Figures
    passed: bool
    attempts: int
    mismatches: tuple[str, ...] = ()
    missed_by_time_alone: bool = False


@dataclass(frozen=True)
class TimingRow:
    """How late the client's stamps are: client's stamp minus the server's, event by event; None where none came.

    wake_p99_ms: how much later than the kernel this process had what arrived, which is not in the stamps; None where
    the process made them itself. process_us_per_step is the CPU time of the client's thread, user and system, from the
    first read of an answer to its judged outcome, over its events; bare_recv_us_per_step that of a thread that receives
    the same stream and does nothing else: the kernel's share, and the price of being woken. None at depth.
    reading_us_per_step is the part before the stream's end; the rest, parsing and judging, disturbs no stream.
    """

    case: str
    ms_per_token: float
    prompt_tokens: int
    events: int
    median_error_ms: float | None
    p99_error_ms: float | None
    wake_p99_ms: float | None
    server_jitter_p99_ms: float | None
    tpot_error: float | None  # as a fraction of the truth
    process_us_per_step: float
    reading_us_per_step: float
    bare_recv_us_per_step: float | None
    stamped_by: str | None
    passed: bool
    attempts: int
    mismatches: tuple[str, ...] = ()
    missed_by_time_alone: bool = False


@dataclass(frozen=True)
class SelftestReport:
    """Every row, and whether this machine's client may be believed."""

    cases: tuple[CaseRow, ...]
    timing: tuple[TimingRow, ...]
    seconds: float

    @property
    def rows(self) -> tuple[CaseRow | TimingRow, ...]:
        """Cases, then timing."""
        return (*self.cases, *self.timing)

    @property
    def passed(self) -> bool:
        """Whether every row passed; false where there is none."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def exit_code(self) -> int:
        """0 passed, 4 measurements by this client on this machine are void."""
        return 0 if self.passed else 4

    def to_json(self) -> dict[str, object]:
        """The report as plain values."""
        return {"passed": self.passed, **asdict(self)}
