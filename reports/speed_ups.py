"""How many times faster a column is than the baseline: paired with the gate's interval, or derived across sessions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..gates.bootstrap import Floats
from ..gates.crossover import candidate_second
from ..gates.intervals import DepthInterval, depth_intervals
from ..gates.pairing import pair_streams
from .estimates import CONFIDENCE, N_RESAMPLES, SEED
from .saved import SavedRun


@dataclass(frozen=True)
class SpeedUp:
    """A ratio of speeds at one depth, or over all of them; ratio None where `reason` says why.

    Paired (one run, the same requests): the geometric mean of the per-request ratios, in a crossover of both start
    orders alike; low and high hold for all depths at once. Derived (two sessions): the ratio of the columns' medians,
    without an interval.
    """

    ratio: float | None
    is_derived: bool
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    launches: int = 0
    is_crossover: bool = False  # start order was taken out
    reason: str | None = None


@dataclass(frozen=True)
class SpeedUps:
    """One column's speed-ups by depth, and their geometric mean."""

    by_depth: dict[int, SpeedUp]
    geometric_mean: SpeedUp


def paired(run: SavedRun, baseline: str, candidate: str, depths: Sequence[int]) -> SpeedUps:
    """Speed-ups of two builds of one run at the depths where both have a speed."""
    if not depths:
        return _none(depths, "no depth at which both builds have a speed", is_derived=False)
    measured = run.cell_streams(baseline, depths[0])
    pairing = pair_streams(
        run.streams,
        baseline=baseline,
        candidate=candidate,
        depths=depths,
        launches=sorted({stream.launch for stream in measured}),
        requests_per_depth=run.manifest.requests_per_depth,
        max_missing_pairs_per_depth=run.manifest.max_void_streams_per_cell,
        void_blocks=run.control.void_blocks,
    )
    if pairing.void_reasons:
        return _none(depths, "; ".join(pairing.void_reasons), is_derived=False)
    # A comparison's table says what its verdict says; a bench, of few launches, keeps the mean anyone can work out.
    is_gate = run.manifest.kind == "compare"
    orders = candidate_second(run.manifest, baseline, candidate, pairing.launches) if is_gate else None
    faster = [[-ratios for ratios in each.log_tpot_ratios()] for each in pairing.depths]  # ln(baseline / candidate)
    intervals = _intervals(faster, orders)
    by_depth = {depth: _from_interval(interval) for depth, interval in zip(depths, intervals, strict=True)}
    (overall,) = _intervals([_mean_over_depths(faster)], orders)
    mean = math.exp(sum(math.log(each.ratio or 1.0) for each in by_depth.values()) / len(by_depth))
    pairs = sum(each.pairs for each in by_depth.values())
    low, high = _bounds(overall)
    return SpeedUps(by_depth, SpeedUp(mean, False, low, high, pairs, overall.launches, _is_crossover(overall)))


def derived(
    baseline_tpots: dict[int, float], candidate_tpots: dict[int, float], *, refusal: str | None = None
) -> SpeedUps:
    """Ratios of two columns' medians from different sessions, at the depths where both have one.

    refusal: why the two sessions may not be compared at all.
    """
    shared = sorted(baseline_tpots.keys() & candidate_tpots.keys())
    if refusal is not None or not shared:
        return _none(shared, refusal or "no depth at which both builds have a speed", is_derived=True)
    ratios = {depth: baseline_tpots[depth] / candidate_tpots[depth] for depth in shared}
    mean = math.exp(sum(math.log(ratio) for ratio in ratios.values()) / len(ratios))
    return SpeedUps({depth: SpeedUp(ratio, True) for depth, ratio in ratios.items()}, SpeedUp(mean, True))


def _none(depths: Sequence[int], reason: str, *, is_derived: bool) -> SpeedUps:
    nothing = SpeedUp(None, is_derived, reason=reason)
    return SpeedUps(dict.fromkeys(depths, nothing), nothing)


def _intervals(log_ratios: Sequence[Sequence[Floats]], orders: Sequence[bool] | None) -> list[DepthInterval]:
    return depth_intervals(
        log_ratios, confidence=CONFIDENCE, n_resamples=N_RESAMPLES, seed=SEED, candidate_second=orders
    )


def _mean_over_depths(faster: Sequence[Sequence[Floats]]) -> list[Floats]:
    """One array a launch: the n-th requests of all depths averaged. Requests of different depths are independent, so
    this has the spread of the mean over depths; a depth's surplus requests are left out of the spread alone.
    """
    launches = zip(*faster, strict=True)
    return [np.mean([values[: min(map(len, depths))] for values in depths], axis=0) for depths in launches]


def _from_interval(interval: DepthInterval) -> SpeedUp:
    low, high = _bounds(interval)
    return SpeedUp(
        math.exp(interval.point_estimate), False, low, high, interval.pairs, interval.launches, _is_crossover(interval)
    )


def _is_crossover(interval: DepthInterval) -> bool:
    return interval.order_effect is not None


def _bounds(interval: DepthInterval) -> tuple[float, float] | tuple[None, None]:
    """The deciding interval; from one launch only the requests' spread, which the table's notes say."""
    half_width = interval.bootstrap_half_width if interval.launches == 1 else interval.half_width
    if not math.isfinite(half_width) or interval.pairs < 2:
        return None, None
    return math.exp(interval.point_estimate - half_width), math.exp(interval.point_estimate + half_width)
