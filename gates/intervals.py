"""The interval that decides: the wider of the two-level bootstrap's and the launch means' Student t.

One launch's requests share its luck (clock, memory layout, autotuning), so the launch is the sampling unit. With few
launches the bootstrap is too narrow (it resamples 3 points) and t is right; with many the bootstrap is the wider. Where
request noise swamps launch luck the bootstrap counts it twice and covers up to 99.8 % (`calibrate --simulate`): wider
than need be, which costs launches and never a false alarm.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .bootstrap import (
    Counts,
    Floats,
    launch_means,
    max_t_half_widths,
    pad_launches,
    resampled_means,
    resampling_weights,
)

MIN_LAUNCHES = 3


@dataclass(frozen=True)
class DepthInterval:
    """One depth's log ratio: point estimate and the half widths of its simultaneous intervals (nan: undefined)."""

    point_estimate: float
    bootstrap_half_width: float
    student_half_width: float
    launches: int
    pairs: int

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


def student_quantile(confidence: float, num_depths: int, launches: int) -> float:
    """t quantile of a two-sided interval, Bonferroni over the depths; nan below 2 launches."""
    if launches < 2:
        return float("nan")
    return float(stats.t.ppf(1 - (1 - confidence) / (2 * num_depths), launches - 1))


def student_half_widths(means: Floats, confidence: float) -> Floats:
    """means [..., D, L] of the launches → half widths [..., D]: t · s / √L."""
    num_depths, launches = means.shape[-2:]
    if launches < 2:
        return np.full(means.shape[:-1], np.nan)
    deviation = means.std(axis=-1, ddof=1)
    result: Floats = student_quantile(confidence, num_depths, launches) * deviation / np.sqrt(launches)
    return result


def half_widths(values: Floats, counts: Counts, weights: Floats, confidence: float) -> tuple[Floats, Floats, Floats]:
    """values [..., D, L·R] → (point estimates, bootstrap half widths, Student half widths), each [..., D].

    The estimate is the mean of the launch means, which is the mean of d where launches have equally many pairs.
    """
    means = launch_means(values, counts)
    estimates = means.mean(axis=-1)
    bootstrap = max_t_half_widths(estimates, resampled_means(values, weights), confidence)
    return estimates, bootstrap, student_half_widths(means, confidence)


def depth_intervals(
    depths: Sequence[Sequence[Floats]], *, confidence: float, n_resamples: int, seed: int
) -> list[DepthInterval]:
    """Intervals that hold for all depths at once; depths[i][l] are the log ratios of launch l, at least one."""
    values, counts = pad_launches(depths)
    if not np.isfinite(values).all():
        raise ValueError("log ratios must be finite")
    width = values.shape[1] // counts.shape[1]
    weights = resampling_weights(counts, width, n_resamples, seed)
    estimates, bootstrap, student = half_widths(values, counts, weights, confidence)
    return [
        DepthInterval(
            point_estimate=float(estimates[index]),
            bootstrap_half_width=float(bootstrap[index]),
            student_half_width=float(student[index]),
            launches=counts.shape[1],
            pairs=int(counts[index].sum()),
        )
        for index in range(len(depths))
    ]
