"""What a real A/A says about a machine: launch and request noise, the smallest effect it can show, what would do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .bootstrap import Floats
from .intervals import MIN_LAUNCHES, student_quantile

MAX_LAUNCHES = 60
REQUEST_CHOICES = (5, 10, 20, 40, 80)


@dataclass(frozen=True)
class NoiseComponents:
    """Standard deviations in log units: of a launch's luck, and of one pair within its launch."""

    launch: float
    request: float

    def of_a_launch_mean(self, requests: int) -> float:
        """Standard deviation of the mean of a launch with so many pairs."""
        return math.sqrt(self.launch**2 + self.request**2 / requests)


@dataclass(frozen=True)
class Recommendation:
    """launches × requests that see an effect; None where not even 60 launches do."""

    effect: float
    launches: int | None
    requests: int


def noise_components(launches: Sequence[Floats]) -> NoiseComponents:
    """One-way random-effects analysis of variance of one depth's log ratios; unequal launches allowed.

    request² = mean square within; launch² = (mean square between − within) / n₀, at least 0. (Searle, Casella and
    McCulloch, Variance Components, 3.6.)
    """
    if len(launches) < 2 or min(len(values) for values in launches) < 1:
        raise ValueError("noise components need at least two launches with a pair each")
    sizes = np.array([len(values) for values in launches], dtype=np.float64)
    total, count = sizes.sum(), len(launches)
    means = np.array([values.mean() for values in launches])
    grand = float((sizes * means).sum() / total)
    between = float((sizes * (means - grand) ** 2).sum()) / (count - 1)
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in launches)
    within = squares / (total - count) if total > count else 0.0
    typical = (total - (sizes**2).sum() / total) / (count - 1)
    return NoiseComponents(launch=math.sqrt(max(0.0, (between - within) / typical)), request=math.sqrt(within))


def detectable_effect(
    noise: NoiseComponents,
    *,
    launches: int,
    requests: int,
    num_depths: int,
    margin: float,
    confidence: float,
    power: float = 0.9,
) -> float:
    """The smallest slowdown (a fraction) at one depth that FAILs with this power: margin + (t + t_power)·s/√L."""
    if launches < MIN_LAUNCHES:
        return math.inf
    error = noise.of_a_launch_mean(requests) / math.sqrt(launches)
    reach = student_quantile(confidence, num_depths, launches) + float(stats.t.ppf(power, launches - 1))
    return math.expm1(math.log1p(margin) + reach * error)


def recommend(
    noise: NoiseComponents, effect: float, *, num_depths: int, margin: float, confidence: float
) -> Recommendation:
    """The cheapest launches × requests by streams measured that see `effect`, a launch costing as much as 10 pairs."""
    best: tuple[float, Recommendation] | None = None
    for requests in REQUEST_CHOICES:
        for launches in range(MIN_LAUNCHES, MAX_LAUNCHES + 1):
            found = detectable_effect(
                noise, launches=launches, requests=requests, num_depths=num_depths, margin=margin, confidence=confidence
            )
            if found <= effect:
                cost = launches * (10.0 + requests)
                if best is None or cost < best[0]:
                    best = (cost, Recommendation(effect, launches, requests))
                break
    return best[1] if best is not None else Recommendation(effect, None, REQUEST_CHOICES[-1])
