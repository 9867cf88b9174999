"""Two-level bootstrap: launches with replacement, then requests inside each drawn launch; simultaneous by max-|t|.

A resampled estimate is linear in the data, mean* = Σ w·d, so the draws are made once as a matrix of weights and every
depth (and, in a simulation, every comparison) is one matrix product. Launches are drawn jointly for all depths,
because one launch's luck touches all of them; requests are drawn for each depth alone. Strata (launches of one start
order, crossover.py) are drawn each for itself, so that a resample never mistakes an order's effect for a launch's luck.
"""

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def resampling_weights(counts: Counts, width: int, n_resamples: int, seed: int, strata: Counts | None = None) -> Floats:
    """Weights of every datum in every resample.

    counts [D, L]: pairs of each depth and launch, at least 1. width R: the longest launch. strata [L], from 0: launches
    are drawn within their own, and every stratum weighs the same; None: all launches are one.
    Returns [D, n_resamples, L·R]; a row sums to 1, and a datum past its launch's count weighs 0.
    """
    if counts.size == 0 or counts.min() < 1:
        raise ValueError("every launch needs a pair at every depth")
    rng = np.random.default_rng(seed)
    num_depths, num_launches = counts.shape
    drawn, launch_weight = _draw_launches(rng, n_resamples, np.zeros(num_launches, int) if strata is None else strata)
    weights = np.empty((num_depths, n_resamples, num_launches * width))
    first_cell = np.arange(n_resamples)[:, None] * (num_launches * width) + drawn * width
    for depth in range(num_depths):
        size = counts[depth, drawn][..., None]  # [B, L, 1]
        request = np.minimum((rng.random((n_resamples, num_launches, width)) * size).astype(np.int64), size - 1)
        weight = np.where(np.arange(width) < size, launch_weight[:, None] / size, 0.0)
        cells = (first_cell[..., None] + request).ravel()
        weights[depth] = np.bincount(cells, weight.ravel(), n_resamples * num_launches * width).reshape(n_resamples, -1)
    return weights


def _draw_launches(rng: np.random.Generator, n_resamples: int, strata: Counts) -> tuple[Counts, Floats]:
    """Launches drawn with replacement within their strata, [B, L], shared by the depths; each draw's weight, [L]."""
    drawn = np.empty((n_resamples, len(strata)), dtype=np.int64)
    weight = np.empty(len(strata))
    num_strata = int(strata.max()) + 1
    for stratum in range(num_strata):
        own = np.flatnonzero(strata == stratum)
        drawn[:, own] = own[rng.integers(len(own), size=(n_resamples, len(own)))]
        weight[own] = 1.0 / (num_strata * len(own))
    return drawn, weight


def resampled_means(values: Floats, weights: Floats) -> Floats:
    """values [..., D, L·R] (0 where absent) and weights [D, B, L·R] → estimates [..., D, B]."""
    return np.stack([values[..., depth, :] @ weights[depth].T for depth in range(weights.shape[0])], axis=-2)


def max_t_half_widths(estimates: Floats, resampled: Floats, confidence: float) -> Floats:
    """Half widths that hold for all depths at once: c·SE with c the quantile of max over depths of |mean* − mean| / SE.

    estimates [..., D], resampled [..., D, B] → [..., D]. SE is the standard deviation of mean*. (Westfall and Young's
    max-T, without studentising each resample.)
    """
    standard_error = resampled.std(axis=-1, ddof=1)  # [..., D]
    # A depth whose data do not vary has SE 0 and deviations 0: it takes no part in the maximum.
    scale = np.where(standard_error > 0, standard_error, np.inf)[..., None]
    largest = (np.abs(resampled - estimates[..., None]) / scale).max(axis=-2)  # [..., B]
    critical = np.quantile(largest, confidence, axis=-1, method="higher")
    result: Floats = critical[..., None] * standard_error
    return result


def pad_launches(launches: Sequence[Sequence[Floats]]) -> tuple[Floats, Counts]:
    """Launches of unequal length → values [D, L·R] padded with 0 and counts [D, L]."""
    counts = np.array([[len(values) for values in depth] for depth in launches], dtype=np.int64)
    width = int(counts.max())
    values = np.zeros((*counts.shape, width))
    for depth, arrays in enumerate(launches):
        for launch, array in enumerate(arrays):
            values[depth, launch, : len(array)] = array
    return values.reshape(counts.shape[0], -1), counts


def launch_means(values: Floats, counts: Counts) -> Floats:
    """values [..., D, L·R], counts [D, L] → mean of each launch [..., D, L]."""
    num_depths, num_launches = counts.shape
    sums = values.reshape(*values.shape[:-2], num_depths, num_launches, -1).sum(axis=-1)
    result: Floats = sums / counts
    return result


def preview_interval(ratios: Floats, confidence: float, n_resamples: int, seed: int) -> tuple[float, float] | None:
    """BCa interval of one launch's mean d, for the display while a run goes on; it knows nothing of launch luck.

    None with fewer than 3 pairs or where BCa is undefined (all values equal).
    """
    if len(ratios) < 3 or np.ptp(ratios) == 0:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        found = stats.bootstrap(
            (ratios,), np.mean, confidence_level=confidence, n_resamples=n_resamples, method="BCa", rng=seed
        ).confidence_interval
    low, high = float(found.low), float(found.high)
    return (low, high) if np.isfinite([low, high]).all() else None
