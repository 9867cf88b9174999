"""The selftest's report for people."""

from collections.abc import Iterator

from .conformance.cases import CASES
from .rows import CaseRow, Figures, SelftestReport, TimingRow


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
