"""Of two output checks of one build the later counts, except that a more lenient one does not undo a FAIL."""

import json
from pathlib import Path

import pytest
from kernarc.gates.outcomes import OutputOutcome, Verdict
from kernarc.gates.output.check_file import counting_check, counting_outcomes


def judged(verdict: Verdict, rate: float | None = 0.0, tau: float | None = 0.1) -> OutputOutcome:
    return OutputOutcome(build="b", verdict=verdict, reason="", max_divergence_rate=rate, tau=tau, positions=9)


@pytest.mark.parametrize(
    ("rate", "tau", "undoes"),
    [
        (0.02, 0.1, True),
        (0.0, 0.0, True),
        (0.03, 0.1, False),
        (0.02, 0.11, False),
        (None, 0.1, False),
        (0.02, None, False),
    ],
    ids=["as strict", "stricter", "a higher rate", "a higher tau", "nothing read", "no tau"],
)
@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_fail_yields_only_to_a_check_that_allows_no_more(
    verdict: Verdict, rate: float | None, tau: float | None, undoes: bool
) -> None:
    """Also not to a FAIL: the next check would then be held against what that one allowed."""
    failed, later = judged(Verdict.FAIL, 0.02), judged(verdict, rate, tau)
    assert (counting_check(failed, later) is later) is undoes


@pytest.mark.parametrize("earlier", [Verdict.PASS, Verdict.VOID, Verdict.INCONCLUSIVE])
def test_whatever_is_no_fail_yields_to_any_later_check(earlier: Verdict) -> None:
    later = judged(Verdict.PASS, 0.5, 9.0)
    assert counting_check(judged(earlier), later) is later
    assert counting_check(None, later) is later


def test_a_fail_that_says_no_allowance_had_none() -> None:
    failed = judged(Verdict.FAIL, None)
    assert counting_check(failed, judged(Verdict.PASS, 0.001)) is failed
    assert counting_check(failed, judged(Verdict.PASS, 0.0)).verdict is Verdict.PASS


@pytest.mark.parametrize(("rate", "counts"), [(0.5, Verdict.FAIL), (0.0, Verdict.PASS)])
def test_a_lenient_check_beside_a_failed_comparison_does_not_count(
    rate: float, counts: Verdict, tmp_path: Path
) -> None:
    for name, outcome in (("verdict.json", judged(Verdict.FAIL)), ("check.json", judged(Verdict.PASS, rate))):
        (tmp_path / name).write_text(json.dumps({"output_checks": [json.loads(outcome.model_dump_json())]}))
    assert counting_outcomes(tmp_path)["b"].verdict is counts
