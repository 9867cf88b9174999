"""The client against a server of known token times: right on every case, and how late its stamps are here."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

from ..client.timestamps import StampedBy
from ..errors import ConfigError
from .checks import case_row, timing_row
from .conformance.case import Case
from .conformance.cases import CASES, DEEP_PROMPT_TOKENS, TIMING
from .conformance.process import ConformanceServer
from .play import play
from .table import CaseRow, SelftestReport, TimingRow

MAX_ATTEMPTS = 3  # a case that misses by time alone is played again: other processes make single stamps late
CASE_OVERHEAD_S = 0.1
CHUNK_SIZES_SHOWN = (1, 2, 3, 4, 5, 8, 12, 16)


def default_cases() -> list[str]:
    """Every case; of the sixteen chunk sizes, eight."""
    hidden = {f"chunks-{size}" for size in range(1, 17) if size not in CHUNK_SIZES_SHOWN}
    return [name for name in CASES if name not in hidden]


def seconds_to_play(names: Iterable[str]) -> float:
    """How long these cases take at their own speed, without a second try."""
    return sum(map(_seconds, (CASES[name] for name in names)))


def _seconds(case: Case) -> float:
    limit_s = min(case.first_token_limit_s, case.stall_limit_s, case.stream_limit_s)
    last_ms = max((due_ms for *_, due_ms in case.shape.events(case.shape.tokens)), default=0.0)
    once = last_ms / 1000 if case.void is None else min(last_ms / 1000, limit_s)
    is_timed_twice = case in TIMING and case.prompt_tokens < DEEP_PROMPT_TOKENS
    return (once + case.pause_s) * (case.requests + is_timed_twice) + CASE_OVERHEAD_S


def run_selftest(
    names: Sequence[str] = (),
    on_row: Callable[[CaseRow | TimingRow], None] | None = None,
    stamped_by: StampedBy = StampedBy.KERNEL,
) -> SelftestReport:
    """Plays the named cases, all of default_cases() where none is named. Takes about a minute in all.

    Raises ConfigError for an unknown name, EngineError where the conformance server does not start.
    """
    chosen = list(names) or default_cases()
    unknown = [name for name in chosen if name not in CASES]
    if unknown:
        near = difflib.get_close_matches(unknown[0], CASES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no selftest case {unknown[0]!r}", f"{hint}`kernarc-gate selftest --list` shows them all")
    start = perf_counter()
    cases: list[CaseRow] = []
    timing: list[TimingRow] = []
    with ConformanceServer() as server:
        for name in chosen:
            row = _row(server, CASES[name], stamped_by)
            if isinstance(row, CaseRow):
                cases.append(row)
            else:
                timing.append(row)
            if on_row is not None:
                on_row(row)
    return SelftestReport(tuple(cases), tuple(timing), perf_counter() - start)


def _row(server: ConformanceServer, case: Case, stamped_by: StampedBy) -> CaseRow | TimingRow:
    judge = timing_row if case in TIMING else case_row
    attempt = 1
    while True:
        row = judge(case, play(server, case, attempt, stamped_by), attempt)
        if row.passed or not row.missed_by_time_alone or attempt == MAX_ATTEMPTS:
            return row
        attempt += 1
