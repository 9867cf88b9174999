"""Shares of positions with an interval that respects clusters: the positions of one request are not independent."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from .outcomes import Rate


def clustered_rate(counts: Sequence[int], sizes: Sequence[int], confidence: float = 0.95) -> Rate:
    """counts[i] of sizes[i] positions in cluster i → share with a Wilson interval on the effective sample size.

    The effective size is p(1−p) / Var(p̂), with the cluster-robust variance of the ratio Σcounts/Σsizes (Cochran,
    Sampling Techniques, 6.4), between the number of clusters and of positions. Where the share is 0 or 1 the variance
    says nothing and a cluster counts as one observation, the most cautious choice (Korn and Graubard 1998).
    """
    hits, positions = np.asarray(counts, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    total, clusters = float(positions.sum()), len(positions)
    if total <= 0:
        raise ValueError("a rate needs at least one position")
    share = float(hits.sum() / total)
    effective = float(clusters)
    if 0 < share < 1 and clusters > 1:
        residuals = hits - share * positions
        variance = clusters / (clusters - 1) * float((residuals**2).sum()) / total**2
        effective = min(total, max(clusters, share * (1 - share) / variance)) if variance > 0 else total
    low, high = _wilson(share, effective, confidence)
    return Rate(rate=share, low=low, high=high)


def _wilson(share: float, size: float, confidence: float) -> tuple[float, float]:
    z = float(stats.norm.ppf((1 + confidence) / 2))
    centre = (share + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    low = 0.0 if share == 0 else max(0.0, centre - half)
    high = 1.0 if share == 1 else min(1.0, centre + half)
    return low, high
