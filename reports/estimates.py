"""The median of a cell and its 95 % interval. Seeded: the same values give the same interval.

Requests inside one launch share that launch's luck, so the bootstrap has two levels: launches are drawn first, then
requests within each drawn launch (Davison and Hinkley 1997, section 3.8). With one launch the interval holds the
requests' spread alone and says so by `launches == 1`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEED = 20_261_014
N_RESAMPLES = 10_000
CONFIDENCE = 0.95
MAX_DRAWN = 4_000_000  # values held at once

Floats = NDArray[np.float64]
ByLaunch = Mapping[int, Sequence[float]]  # launch → one value a request


@dataclass(frozen=True)
class Estimate:
    """A point with its confidence interval; low and high are None where a single value has no spread."""

    point_estimate: float
    low: float | None
    high: float | None
    launches: int
    samples: int


def median_estimate(by_launch: ByLaunch) -> Estimate | None:
    """Median over every request, with the two-level percentile bootstrap; None without a value."""
    groups = _groups(by_launch)
    if not groups:
        return None
    pooled = np.concatenate(groups)
    point = float(np.median(pooled))
    if len(pooled) < 2:
        return Estimate(point, None, None, len(groups), len(pooled))
    low, high = _percentiles(_resampled_medians(groups))
    return Estimate(point, low, high, len(groups), len(pooled))


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean of logs); every value positive, at least one."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _groups(by_launch: ByLaunch) -> list[Floats]:
    """One sorted array a launch, in launch order: the order of the records cannot reach the result."""
    return [
        np.sort(np.asarray(by_launch[launch], dtype=np.float64)) for launch in sorted(by_launch) if by_launch[launch]
    ]


def _resampled_medians(groups: Sequence[Floats]) -> Floats:
    """One median a resample [R], drawn in chunks that fit into memory whatever the number of requests."""
    rng = np.random.default_rng(SEED)
    sizes = np.array([len(group) for group in groups])
    padded = np.full((len(groups), int(sizes.max())), np.nan)
    for row, group in enumerate(groups):
        padded[row, : len(group)] = group
    chunk = max(1, MAX_DRAWN // padded.size)
    starts = range(0, N_RESAMPLES, chunk)
    return np.concatenate([_medians(rng, padded, sizes, min(chunk, N_RESAMPLES - start)) for start in starts])


def _medians(rng: np.random.Generator, padded: Floats, sizes: NDArray[np.intp], resamples: int) -> Floats:
    """padded [L, n_max], NaN beyond each launch's own size [L] → medians of two-level resamples [resamples]."""
    launches = (rng.random((resamples, len(sizes))) * len(sizes)).astype(np.intp)  # [R, L]
    drawn_sizes = sizes[launches][..., None]  # [R, L, 1]
    places = (rng.random((resamples, len(sizes), padded.shape[1])) * drawn_sizes).astype(np.intp)
    drawn = padded[launches[..., None], places]  # [R, L, n_max]
    drawn[np.broadcast_to(np.arange(padded.shape[1]) >= drawn_sizes, drawn.shape)] = np.nan
    ordered = np.sort(drawn.reshape(resamples, -1), axis=1)  # NaN last
    counts = np.count_nonzero(~np.isnan(ordered), axis=1)
    rows = np.arange(resamples)
    medians: Floats = (ordered[rows, (counts - 1) // 2] + ordered[rows, counts // 2]) / 2
    return medians


def _percentiles(resampled: Floats) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return float(low), float(high)
