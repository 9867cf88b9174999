"""The interval that decides: the wider of the two-level bootstrap's and the launch means' Student t.

Both take the effect of start order out where it can be told (crossover.py); with one order alone they are plain.

One launch's requests share its luck (clock, memory layout, autotuning), so the launch is the sampling unit. With few
launches the bootstrap is too narrow (it resamples 3 points) and t is right; with many the bootstrap is the wider. Where
request noise swamps launch luck the bootstrap counts it twice and covers up to 99.8 % (`calibrate --simulate`): wider
than need be, which costs launches and never a false alarm.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .bootstrap import (
    Counts,
    Floats,
    launch_means,
    max_t_half_widths,
    pad_launches,
    resampled_means,
    resampling_weights,
)
from .crossover import LaunchDesign

MIN_LAUNCHES = 3


@dataclass(frozen=True)
class DepthInterval:
    """One depth's log ratio: point estimate and the half widths of its simultaneous intervals (nan: undefined).

    order_effect: how much slower (log units) an engine is for being started second, taken out of the estimate; its
    interval has the Student half width too. None in the plain design.
    """

    point_estimate: float
    bootstrap_half_width: float
    student_half_width: float
    launches: int
    pairs: int
    order_effect: float | None = None

    @property
    def design(self) -> LaunchDesign:
        """Of so many launches, told apart by start order or not."""
        is_plain = self.order_effect is None
        return LaunchDesign.plain(self.launches) if is_plain else LaunchDesign.alternating(self.launches)

    @property
    def half_width(self) -> float:
        """Of the wider interval; nan where either is undefined."""
        return float(np.maximum(self.bootstrap_half_width, self.student_half_width))

    @property
    def low(self) -> float:
        """Lower bound of the deciding interval, in log units."""
        return self.point_estimate - self.half_width

    @property
    def high(self) -> float:
        """Upper bound of the deciding interval, in log units."""
        return self.point_estimate + self.half_width


def student_half_widths(means: Floats, confidence: float, design: LaunchDesign | None = None) -> Floats:
    """means [..., D, L] of the launches → half widths [..., D]: t · s / √L, or a crossover's; nan of one launch."""
    num_depths, launches = means.shape[-2:]
    design = design or LaunchDesign.plain(launches)
    result: Floats = design.reach(confidence, num_depths) * design.deviations(means)
    return result


def half_widths(
    values: Floats, counts: Counts, weights: Floats, confidence: float, design: LaunchDesign | None = None
) -> tuple[Floats, Floats, Floats]:
    """values [..., D, L·R] → (point estimates, bootstrap half widths, Student half widths), each [..., D].

    The estimate is the mean of the launch means, which is the mean of d where launches have equally many pairs; in a
    crossover the mean of the two orders' means. weights: drawn in the same design.
    """
    means = launch_means(values, counts)
    design = design or LaunchDesign.plain(means.shape[-1])
    estimates = design.estimates(means)
    bootstrap = max_t_half_widths(estimates, resampled_means(values, weights), confidence)
    return estimates, bootstrap, student_half_widths(means, confidence, design)


def depth_intervals(
    depths: Sequence[Sequence[Floats]],
    *,
    confidence: float,
    n_resamples: int,
    seed: int,
    candidate_second: Sequence[bool] | None = None,
) -> list[DepthInterval]:
    """Intervals that hold for all depths at once; depths[i][l] are the log ratios of launch l, at least one.

    candidate_second: of every launch, whether the candidate was started second; None: nobody knows.
    """
    values, counts = pad_launches(depths)
    if not np.isfinite(values).all():
        raise ValueError("log ratios must be finite")
    design = LaunchDesign.of(candidate_second, counts.shape[1])
    width = values.shape[1] // counts.shape[1]
    weights = resampling_weights(counts, width, n_resamples, seed, design.strata)
    estimates, bootstrap, student = half_widths(values, counts, weights, confidence, design)
    orders = design.order_effects(launch_means(values, counts))
    return [
        DepthInterval(
            point_estimate=float(estimates[index]),
            bootstrap_half_width=float(bootstrap[index]),
            student_half_width=float(student[index]),
            launches=counts.shape[1],
            pairs=int(counts[index].sum()),
            order_effect=None if orders is None else float(orders[index]),
        )
        for index in range(len(depths))
    ]
