"""Start order as a crossover (AB/BA): launches start their engines in turned order, and what that does is taken out.

The engine that is started second can run faster or slower for reasons that belong to no build: where its memory lies,
what the first one left in the caches. A launch's mean log ratio is then d = μ + o·π + ε, o = +1 where the candidate
was started second, −1 where the baseline was. This is the two-period crossover with launches for subjects and start
positions for periods: the mean of the two orders' means is free of π at any n₁, n₂ ≥ 1, and half their difference
estimates π. Both have variance σ²/4·(1/n₁ + 1/n₂); σ² is what is left around each order's own mean, with n₁ + n₂ − 2
degrees of freedom. (Hills and Armitage 1979; Senn, Cross-over Trials in Clinical Research, ch. 3; Jones and Kenward,
Design and Analysis of Cross-Over Trials, ch. 2: the treatment effect adjusted for a period effect.)

The rule is fixed before anything is measured: from 4 launches that hold both orders the effect is always taken out,
whether the data show one or not; to test for it first spoils the error rate (Freeman 1989, on carry-over). Where there
is none t is 38 % wider at 5 launches, 7 % at 8, 3 % at 12 (four depths, three looks), which costs a 3 % slowdown 0.3
launches; where the second engine is 2 % faster it finds every 3 % slowdown, not one in two (`calibrate --simulate`).
3 launches would keep one degree of freedom, and t(0.975, 1) is 12.7, so they stay plain: a third of the effect is in
the estimate then, and all of it in the interval's width, which so covers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ..harness.run.records import RunManifest
from ..harness.run.schedule import launch_order
from .bootstrap import Counts, Floats

MIN_CROSSOVER_LAUNCHES = 4  # two degrees of freedom


@dataclass(frozen=True, eq=False)
class LaunchDesign:
    """Which launches share a start order. strata [L]: 0 or 1 by who was started second; all 0 in the plain design."""

    strata: Counts

    @classmethod
    def plain(cls, launches: int) -> "LaunchDesign":
        """The mean of all launches: start order is unknown, or does not vary."""
        return cls(np.zeros(launches, dtype=np.int64))

    @classmethod
    def of(cls, candidate_second: Sequence[bool] | None, launches: int) -> "LaunchDesign":
        """A crossover from 4 launches that hold both orders; plain otherwise. candidate_second: of every launch."""
        if candidate_second is None or launches < MIN_CROSSOVER_LAUNCHES or len(set(candidate_second)) < 2:
            return cls.plain(launches)
        if len(candidate_second) != launches:
            raise ValueError(f"{len(candidate_second)} start orders for {launches} launches")
        return cls(np.array([0 if is_second else 1 for is_second in candidate_second], dtype=np.int64))

    @classmethod
    def alternating(cls, launches: int) -> "LaunchDesign":
        """So many launches in turned order, as they are measured."""
        return cls.of([launch % 2 == 0 for launch in range(launches)], launches)

    @property
    def is_crossover(self) -> bool:
        """Whether start order is taken out."""
        return self.num_strata == 2

    @property
    def num_strata(self) -> int:
        """2 in a crossover, else 1."""
        return int(self.strata.max()) + 1

    @property
    def sizes(self) -> Counts:
        """Launches of each launch's own stratum, [L]."""
        result: Counts = np.bincount(self.strata)[self.strata]
        return result

    @property
    def weights(self) -> Floats:
        """Of every launch in the estimate, [L]: strata count alike, and launches alike within one."""
        result: Floats = 1.0 / (self.num_strata * self.sizes)
        return result

    @property
    def degrees_of_freedom(self) -> int:
        """L − 2 in a crossover, L − 1 otherwise; 0 where no deviation is left."""
        return len(self.strata) - self.num_strata

    def reach(self, confidence: float, num_depths: int) -> float:
        """Half width of the two-sided t interval, Bonferroni over depths, per unit of a launch's standard deviation.

        t·√(1/L) plain, t·√((1/n₁ + 1/n₂)/4) in a crossover; nan without a degree of freedom.
        """
        if self.degrees_of_freedom < 1:
            return float("nan")
        quantile = stats.t.ppf(1 - (1 - confidence) / (2 * num_depths), self.degrees_of_freedom)
        return float(quantile * self.unit_error)

    @property
    def unit_error(self) -> float:
        """Standard error of the estimate per unit of a launch's standard deviation."""
        return float(np.sqrt((self.weights**2).sum()))

    def estimates(self, means: Floats) -> Floats:
        """Launch means [..., L] → estimates [...]: the mean of the strata's means."""
        result: Floats = means @ self.weights
        return result

    def deviations(self, means: Floats) -> Floats:
        """Launch means [..., L] → standard deviation around each stratum's own mean [...]; nan where none is left."""
        if self.degrees_of_freedom < 1:
            return np.full(means.shape[:-1], np.nan)
        squares = np.zeros(means.shape[:-1])
        for stratum in range(self.num_strata):
            own = means[..., self.strata == stratum]
            squares += ((own - own.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1)
        result: Floats = np.sqrt(squares / self.degrees_of_freedom)
        return result

    def order_effects(self, means: Floats) -> Floats | None:
        """Launch means [..., L] → π [...]: how much slower (log units) an engine is for being started second."""
        if not self.is_crossover:
            return None
        second, first = (means[..., self.strata == stratum].mean(axis=-1) for stratum in (0, 1))
        result: Floats = (second - first) / 2
        return result


def candidate_second(
    manifest: RunManifest, baseline: str, candidate: str, launches: Sequence[int]
) -> tuple[bool, ...] | None:
    """Whether the candidate was started after the baseline, launch by launch.

    None where start order does not exist: engines that somebody else started, resident at once.
    """
    builds = {build.name: build for build in manifest.builds}
    is_ours = all(builds[name].engine != "endpoint" for name in (baseline, candidate))
    if not is_ours and manifest.residency == "both":
        return None
    orders = (launch_order(list(builds), launch) for launch in launches)
    return tuple(order.index(candidate) > order.index(baseline) for order in orders)
