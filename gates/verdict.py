"""The decision: speed intervals, the output check and what voids, joined into one of four words. Fails closed."""

import math
from collections.abc import Sequence

from .crossover import LaunchDesign
from .intervals import MIN_LAUNCHES, DepthInterval
from .outcomes import OutputOutcome, Verdict

MAX_LAUNCHES_WORTH_NAMING = 200


def speed_verdict(intervals: Sequence[DepthInterval], margin: float, *, are_fresh_launches: bool = True) -> Verdict:
    """PASS if every upper bound is below the margin, FAIL if some lower bound is above it, else INCONCLUSIVE.

    margin is a fraction. Fewer than 3 launches or an undefined bound is INCONCLUSIVE; no depth at all is VOID.
    are_fresh_launches: False where a server kept running, so that "launches" are repeats of one start's luck, which no
    number of them shows; that is INCONCLUSIVE.
    """
    if not intervals:
        return Verdict.VOID
    if not are_fresh_launches:
        return Verdict.INCONCLUSIVE
    bounds = [bound for interval in intervals for bound in (interval.low, interval.high)]
    if min(interval.launches for interval in intervals) < MIN_LAUNCHES or not all(map(math.isfinite, bounds)):
        return Verdict.INCONCLUSIVE
    limit = math.log1p(margin)
    if any(interval.low > limit for interval in intervals):
        return Verdict.FAIL
    if all(interval.high < limit for interval in intervals):
        return Verdict.PASS
    return Verdict.INCONCLUSIVE


def joint_verdict(
    speed: Verdict, baseline: OutputOutcome | None, candidate: OutputOutcome | None, void_reasons: Sequence[str]
) -> Verdict:
    """One word for speed, both output checks and what voids. No speed without a passed output check.

    Wrong candidate output is FAIL whatever else happened; a wrong baseline makes the comparison VOID, because a speed
    measured against wrong answers means nothing.
    """
    if candidate is not None and candidate.verdict is Verdict.FAIL:
        return Verdict.FAIL
    if void_reasons or speed is Verdict.VOID:
        return Verdict.VOID
    if baseline is not None and baseline.verdict in (Verdict.FAIL, Verdict.VOID):
        return Verdict.VOID
    if speed is Verdict.FAIL:
        return Verdict.FAIL
    passed = [check is not None and check.verdict is Verdict.PASS for check in (baseline, candidate)]
    if speed is Verdict.PASS and all(passed):
        return Verdict.PASS
    return Verdict.INCONCLUSIVE


def improved_depths(intervals: Sequence[tuple[int, DepthInterval]]) -> tuple[int, ...]:
    """Depths whose upper bound lies below zero, from at least 3 launches."""
    return tuple(depth for depth, interval in intervals if interval.launches >= MIN_LAUNCHES and interval.high < 0)


def launches_needed(
    intervals: Sequence[DepthInterval], margin: float, confidence: float, confidence_then: float | None = None
) -> int | None:
    """Launches at which the deciding interval would clear the margin if the estimates stay where they are.

    confidence: of the present intervals; confidence_then: of those to come, the same unless given. To PASS every depth
    has to, to FAIL one is enough. The half width at n launches is the present one times the ratio of the t interval's
    reach, plain or crossover as now. None where the noise is unknown, or no number worth naming (200) would do.
    """
    if not intervals or any(not interval.half_width > 0 for interval in intervals):
        return None
    limit = math.log1p(margin)
    levels = (confidence, confidence_then or confidence)
    needed = [
        _needed_at(interval, abs(interval.point_estimate - limit), levels, len(intervals)) for interval in intervals
    ]
    above = [count for interval, count in zip(intervals, needed, strict=True) if interval.point_estimate > limit]
    decisive = min(above) if above else max(needed)
    return int(decisive) if math.isfinite(decisive) else None


def _needed_at(interval: DepthInterval, distance: float, confidence: tuple[float, float], num_depths: int) -> float:
    """Launches until one depth's half width is below its distance from the margin; inf if over 200."""
    now = interval.design.reach(confidence[0], num_depths)
    for launches in range(max(interval.launches + 1, MIN_LAUNCHES), MAX_LAUNCHES_WORTH_NAMING + 1):
        design = LaunchDesign.plain(launches) if interval.order_effect is None else LaunchDesign.alternating(launches)
        if interval.half_width * design.reach(confidence[1], num_depths) / now < distance:
            return launches
    return math.inf
