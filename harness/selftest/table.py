"""What a selftest says, row by row, and the same for people."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .conformance.cases import CASES


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


def case_list() -> Iterator[str]:
    """Every case and what it plays."""
    return (f"{case.name:26} {case.says}" for case in CASES.values())


def case_line(row: CaseRow) -> str:
    """One line: verdict, case, truth and measured side by side."""
    return f"{_verdict(row)} {row.case:26} {_figures(row.truth):37} | {_figures(row.measured)}{_tries(row)}".rstrip()


def timing_line(row: TimingRow) -> str:
    """One line: the error of this client's stamps at one speed and depth."""
    return (
        f"{_verdict(row)} {row.ms_per_token:>8g} {row.prompt_tokens:>10,} {row.events:>7,} "
        f"{_known(row.median_error_ms)} {_known(row.p99_error_ms)} {_known(row.wake_p99_ms)} "
        f"{_known(row.server_jitter_p99_ms)} "
        f"{_known(row.tpot_error, '+9.3%')} {row.reading_us_per_step:>9.1f} {row.process_us_per_step:>9.1f} "
        f"{_known(row.bare_recv_us_per_step, '9.1f')}"
        f"{_tries(row)}"
    ).rstrip()


_FIGURES_HEAD = f"{'tokens':>6} {'1st token':>10} {'ms/token':>9} {'ms/step':>9}"
CASE_HEADS = (
    f"     {'':26} {'truth':37} | measured",
    f"     {'case':26} {_FIGURES_HEAD} | {_FIGURES_HEAD}",
)
TIMING_HEAD = (
    f"     {'ms/token':>8} {'prompt':>10} {'events':>7} {'median ms':>9} {'p99 ms':>9} {'woken':>9} {'jitter':>9} "
    f"{'TPOT off':>9} {'reading':>9} {'in all':>9} {'bare recv':>9}"
)


def lines(report: SelftestReport) -> Iterator[str]:
    """The whole report, mismatches spelt out, the verdict last."""
    if report.cases:
        yield from CASE_HEADS
        for row in report.cases:
            yield case_line(row)
            yield from (f"       {row.says}: {mismatch}" for mismatch in row.mismatches)
    if report.timing:
        yield ""
        yield f"How late this client's stamps are ({_stamped_by(report)}); how late this process was"
        yield "woken and the server wrote (99 %), neither of which is in them; and what a step costs this process in"
        yield "µs of CPU time: while it reads, in all with parsing and judging once the stream has ended, and what a"
        yield "thread pays that only receives it:"
        yield TIMING_HEAD
        for timing in report.timing:
            yield timing_line(timing)
            yield from (f"       {mismatch}" for mismatch in timing.mismatches)
    yield ""
    yield _summary(report)


def _summary(report: SelftestReport) -> str:
    rows = report.rows
    failed = [row for row in rows if not row.passed]
    if not failed:
        return f"PASS: {len(rows)} of {len(rows)} in {report.seconds:.0f} s."
    said = f"FAIL: {len(failed)} of {len(rows)} in {report.seconds:.0f} s: {', '.join(row.case for row in failed)}."
    if all(row.missed_by_time_alone for row in failed):
        said += (
            f"\nOnly times are off: something else keeps this machine busy. Look with `top`, then try again with "
            f"`kernarc-gate selftest --case {failed[0].case}`."
        )
    return said


def _stamped_by(report: SelftestReport) -> str:
    by = {timing.stamped_by for timing in report.timing}
    if by == {"kernel"}:
        return "the kernel stamps what arrives"
    return "this process stamps what it has read" if by == {"process"} else "kernel and process stamp by turns"


def _figures(figures: Figures) -> str:
    if not figures.is_usable:
        return f"void: {figures.void_reason or ''}"
    times = (_known(figures.ttft_ms, "10.1f"), _known(figures.tpot_ms, "9.3f"), _known(figures.step_ms, "9.3f"))
    return f"{figures.tokens:>6} {' '.join(times)}"


def _known(value: float | None, form: str = "9.3f") -> str:
    return f"{value:{form}}" if value is not None else f"{'–':>{form.lstrip('+').partition('.')[0]}}"


def _verdict(row: CaseRow | TimingRow) -> str:
    return "pass" if row.passed else "FAIL"


def _tries(row: CaseRow | TimingRow) -> str:
    return "" if row.attempts == 1 else f"  ({row.attempts} tries)"
