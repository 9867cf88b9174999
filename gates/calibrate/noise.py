"""Noise of a known kind, to find out what the gate's rule does under it. Everything is drawn in log-ratio units."""

from dataclasses import dataclass

import numpy as np

from ..bootstrap import Floats


@dataclass(frozen=True)
class Noise:
    """How the pairs of one comparison scatter around the true effect.

    launch, request: standard deviations of a launch's luck and of one pair. shared: share of the launch variance that
    all depths have in common. tail_df: Student t of so many degrees of freedom, scaled to the same standard deviations.
    wander: lag-1 correlation of successive pairs. drift: how much the machine slows down in the course of a launch, met
    by ABBA order. order: how much slower an engine is for being started second, met by launches in turned order.
    spike_rate, spike: share of streams that take (1 + spike) times as long.
    bad_launch_rate, bad_launch: share of engine launches that are slower by that fraction as a whole.
    """

    name: str
    launch: float = 0.005
    request: float = 0.02
    shared: float = 0.0
    tail_df: float | None = None
    wander: float = 0.0
    drift: float = 0.0
    order: float = 0.0
    spike_rate: float = 0.0
    spike: float = 0.0
    bad_launch_rate: float = 0.0
    bad_launch: float = 0.0

    def draw(self, rng: np.random.Generator, comparisons: int, depths: int, launches: int, requests: int) -> Floats:
        """Noise of every pair, [comparisons, depths, launches, requests]."""
        size = (comparisons, depths, launches, requests)
        common = self._standard(rng, (comparisons, 1, launches, 1))
        own = self._standard(rng, (comparisons, depths, launches, 1))
        noise = self.launch * (np.sqrt(self.shared) * common + np.sqrt(1 - self.shared) * own)
        noise = noise + self.request * self._wandering(self._standard(rng, size))
        noise += self._drift(requests) + self._order(launches)
        noise += np.log1p(self.spike) * self._one_sided(rng, self.spike_rate, size)
        bad = self._one_sided(rng, self.bad_launch_rate, (comparisons, 1, launches, 1))
        result: Floats = noise + np.log1p(self.bad_launch) * bad
        return result

    def _standard(self, rng: np.random.Generator, size: tuple[int, ...]) -> Floats:
        """Mean 0, standard deviation 1."""
        if self.tail_df is None:
            return rng.standard_normal(size)
        scale = np.sqrt(self.tail_df / (self.tail_df - 2))
        result: Floats = rng.standard_t(self.tail_df, size) / scale
        return result

    def _wandering(self, white: Floats) -> Floats:
        """First-order autoregression along the requests, variance kept."""
        if not self.wander:
            return white
        innovation = np.sqrt(1 - self.wander**2)
        for request in range(1, white.shape[-1]):
            white[..., request] = self.wander * white[..., request - 1] + innovation * white[..., request]
        return white

    def _drift(self, requests: int) -> Floats:
        """Pairs run A B, B A, A B, …: the second stream of each is one slot of 2·requests further down the slope."""
        return self.drift / (2 * requests) * _alternating(requests)

    def _order(self, launches: int) -> Floats:
        """[launches, 1]: the candidate is started second in every other launch, first in the rest."""
        return self.order * _alternating(launches)[:, None]

    def _one_sided(self, rng: np.random.Generator, rate: float, size: tuple[int, ...]) -> Floats:
        """+1 where the candidate was hit, −1 where the baseline was, 0 where neither or both."""
        if not rate:
            return np.zeros(size)
        return (rng.random(size) < rate).astype(np.float64) - (rng.random(size) < rate)


def _alternating(count: int) -> Floats:
    return np.where(np.arange(count) % 2 == 0, 1.0, -1.0)


DESIGN_NOISE = Noise("design: launch 0.5 %, request 2 %")

NOISES = (
    DESIGN_NOISE,
    Noise("quiet requests: launch 0.5 %, request 0.5 %", request=0.005),
    Noise("loud launches: launch 2 %, request 2 %", launch=0.02),
    Noise("no launch luck: request 2 %", launch=0.0),
    Noise("heavy tails: Student t, 3 df", tail_df=3.0),
    Noise("correlated depths: 90 % of launch luck shared", shared=0.9),
    Noise("wandering load: lag-1 correlation 0.9", wander=0.9),
    Noise("drift: 10 % slower in the course of a launch, ABBA", drift=0.1),
    Noise("order +0.3 %: the engine started second is 0.3 % slower", order=0.003),
    Noise("order −2 %: the engine started second is 2 % faster", order=-0.02),
    Noise("order −5 %: the engine started second is 5 % faster", order=-0.05),
    Noise("order −5 %, loud: and launch 2 %", launch=0.02, order=-0.05),
    Noise("spikes: 2 % of streams take 30 % longer", spike_rate=0.02, spike=0.3),
    Noise("bad launches: 1 in 10 is 3 % slower", bad_launch_rate=0.1, bad_launch=0.03),
)
