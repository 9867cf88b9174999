"""Every combination of speed, output and void reasons, and that only one of them lets a change through."""

import itertools
import math

import pytest
from kernarc.gates.intervals import DepthInterval
from kernarc.gates.outcomes import OutputOutcome, Verdict
from kernarc.gates.verdict import (
    improved_depths,
    joint_verdict,
    launches_needed,
    speed_verdict,
)


def interval(low: float, high: float, launches: int = 5) -> DepthInterval:
    half = (high - low) / 2
    return DepthInterval((low + high) / 2, half / 2, half, launches, 100)


def output(verdict: Verdict) -> OutputOutcome:
    return OutputOutcome(
        build="x", verdict=verdict, positions=9, matches=9, near_ties=0, divergences=0, worst_gap=0.0, reason=""
    )


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([interval(-0.02, 0.0)], Verdict.PASS),
        ([interval(-0.002, 0.009), interval(-0.01, 0.005)], Verdict.PASS),
        ([interval(-0.002, 0.009), interval(-0.01, 0.011)], Verdict.INCONCLUSIVE),
        ([interval(-0.002, 0.009), interval(0.011, 0.03)], Verdict.FAIL),
        ([interval(0.009, 0.03)], Verdict.INCONCLUSIVE),
        ([interval(-0.02, 0.0, launches=2)], Verdict.INCONCLUSIVE),
        ([interval(0.2, 0.3, launches=2)], Verdict.INCONCLUSIVE),
        ([interval(math.nan, math.nan)], Verdict.INCONCLUSIVE),
        ([interval(-0.02, 0.0), interval(math.nan, math.nan)], Verdict.INCONCLUSIVE),
        ([interval(-math.inf, math.inf)], Verdict.INCONCLUSIVE),
        ([], Verdict.VOID),
    ],
)
def test_speed_verdict_at_one_percent(intervals: list[DepthInterval], expected: Verdict) -> None:
    assert speed_verdict(intervals, 0.01) is expected


def test_only_one_combination_passes() -> None:
    checks = [None, *(output(verdict) for verdict in Verdict)]
    passing = [
        (speed, baseline, candidate, void)
        for speed, baseline, candidate, void in itertools.product(Verdict, checks, checks, [(), ("engine died",)])
        if joint_verdict(speed, baseline, candidate, void) is Verdict.PASS
    ]
    assert passing == [(Verdict.PASS, output(Verdict.PASS), output(Verdict.PASS), ())]


def test_wrong_output_fails_whatever_the_speed() -> None:
    for speed in Verdict:
        assert joint_verdict(speed, output(Verdict.PASS), output(Verdict.FAIL), ("a pair is missing",)) is Verdict.FAIL


def test_a_wrong_baseline_voids() -> None:
    assert joint_verdict(Verdict.PASS, output(Verdict.FAIL), output(Verdict.PASS), ()) is Verdict.VOID
    assert joint_verdict(Verdict.FAIL, output(Verdict.FAIL), output(Verdict.PASS), ()) is Verdict.VOID


def test_an_output_check_that_could_not_run_never_passes_and_hides_no_regression() -> None:
    unknown = output(Verdict.INCONCLUSIVE)
    assert joint_verdict(Verdict.PASS, unknown, unknown, ()) is Verdict.INCONCLUSIVE
    assert joint_verdict(Verdict.FAIL, unknown, unknown, ()) is Verdict.FAIL


def test_exit_codes() -> None:
    assert {verdict.value: verdict.exit_code for verdict in Verdict} == {
        "PASS": 0,
        "FAIL": 1,
        "INCONCLUSIVE": 3,
        "VOID": 4,
    }


def test_improved_needs_an_upper_bound_below_zero() -> None:
    found = improved_depths(
        [(128, interval(-0.05, -0.001)), (256, interval(-0.05, 0.001)), (512, interval(-1, -0.5, 2))]
    )
    assert found == (128,)


def test_launches_needed_by_hand() -> None:
    """t(0.975, 4)/√5 = 1.2416; the half width 0.02 must fall below 0.01: t(0.975, n−1)/√n < 0.6208 first at n = 13."""
    deciding = DepthInterval(math.log1p(0.01) - 0.01, 0.0, 0.02, 5, 100)
    assert launches_needed([deciding], 0.01, 0.95) == 13


def test_no_number_of_launches_settles_an_effect_on_the_margin() -> None:
    assert launches_needed([DepthInterval(math.log1p(0.01), 0.0, 0.02, 5, 100)], 0.01, 0.95) is None
    assert launches_needed([], 0.01, 0.95) is None
    assert launches_needed([DepthInterval(0.0, math.nan, math.nan, 1, 10)], 0.01, 0.95) is None
