"""What a real A/A says about a machine: launch and request noise, the smallest effect it can show, what would do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ..bootstrap import Floats
from ..crossover import LaunchDesign
from ..intervals import MIN_LAUNCHES

MAX_LAUNCHES = 60
REQUEST_CHOICES = (5, 10, 20, 40, 80)


@dataclass(frozen=True)
class NoiseComponents:
    """Standard deviations in log units: of a launch's luck, and of one pair within its launch.

    order: how much slower (log units) an engine is for being started second, and its standard error; None where start
    order does not vary.
    """

    launch: float
    request: float
    order: float | None = None
    order_error: float | None = None

    def of_a_launch_mean(self, requests: int) -> float:
        """Standard deviation of the mean of a launch with so many pairs."""
        return math.sqrt(self.launch**2 + self.request**2 / requests)


@dataclass(frozen=True)
class Recommendation:
    """launches × requests that see an effect; None where not even 60 launches do."""

    effect: float
    launches: int | None
    requests: int


def noise_components(launches: Sequence[Floats], candidate_second: Sequence[bool] | None = None) -> NoiseComponents:
    """One-way random-effects analysis of variance of one depth's log ratios; unequal launches allowed.

    request² = mean square within; launch² = (mean square between − within) / n₀, at least 0. (Searle, Casella and
    McCulloch, Variance Components, 3.6.) Where start order varies, launches deviate from their own order's mean.
    """
    design = LaunchDesign.of(candidate_second, len(launches))
    if design.degrees_of_freedom < 1 or min(len(values) for values in launches) < 1:
        raise ValueError("noise components need at least two launches with a pair each")
    sizes = np.array([len(values) for values in launches], dtype=np.float64)
    means = np.array([values.mean() for values in launches])
    total, count = sizes.sum(), len(launches)
    between = typical = 0.0
    for stratum in range(design.num_strata):
        of_order, own = sizes[design.strata == stratum], means[design.strata == stratum]
        grand = (of_order * own).sum() / of_order.sum()
        between += float((of_order * (own - grand) ** 2).sum()) / design.degrees_of_freedom
        typical += (of_order.sum() - (of_order**2).sum() / of_order.sum()) / design.degrees_of_freedom
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in launches)
    within = squares / (total - count) if total > count else 0.0
    order = design.order_effects(means)
    return NoiseComponents(
        launch=math.sqrt(max(0.0, (between - within) / typical)),
        request=math.sqrt(within),
        order=None if order is None else float(order),
        order_error=None if order is None else float(design.deviations(means) * design.unit_error),
    )


def detectable_effect(
    noise: NoiseComponents,
    *,
    launches: int,
    requests: int,
    num_depths: int,
    margin: float,
    confidence: float,
    power: float = 0.9,
    is_crossover: bool = True,
) -> float:
    """The smallest slowdown (a fraction) at one depth that FAILs with this power: margin + (t + t_power)·s/√L.

    is_crossover: engines that we start, so with a crossover's error and degrees of freedom; else plain.
    """
    if launches < MIN_LAUNCHES:
        return math.inf
    design = LaunchDesign.alternating(launches) if is_crossover else LaunchDesign.plain(launches)
    powered = float(stats.t.ppf(power, design.degrees_of_freedom)) * design.unit_error
    reach = design.reach(confidence, num_depths) + powered
    return math.expm1(math.log1p(margin) + reach * noise.of_a_launch_mean(requests))


def recommend(
    noise: NoiseComponents,
    effect: float,
    *,
    num_depths: int,
    margin: float,
    confidence: float,
    is_crossover: bool = True,
) -> Recommendation:
    """The cheapest launches × requests by streams measured that see `effect`, a launch costing as much as 10 pairs."""
    best: tuple[float, Recommendation] | None = None
    for requests in REQUEST_CHOICES:
        for launches in range(MIN_LAUNCHES, MAX_LAUNCHES + 1):
            found = detectable_effect(
                noise,
                launches=launches,
                requests=requests,
                num_depths=num_depths,
                margin=margin,
                confidence=confidence,
                is_crossover=is_crossover,
            )
            if found <= effect:
                cost = launches * (10.0 + requests)
                if best is None or cost < best[0]:
                    best = (cost, Recommendation(effect, launches, requests))
                break
    return best[1] if best is not None else Recommendation(effect, None, REQUEST_CHOICES[-1])
