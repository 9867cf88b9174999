"""A real A/A on this machine: pairs of a build with itself, turned into noise components and what they allow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..bootstrap import Floats
from ..compare import Measured
from ..config import GateConfig
from .noise import Noise
from .noise_components import NoiseComponents, Recommendation, detectable_effect, noise_components, recommend
from .simulate import GateRule

WANTED_EFFECTS = (0.02, 0.03, 0.05)


@dataclass(frozen=True)
class DepthNoise:
    """One depth of an A/A."""

    depth: int
    noise: NoiseComponents
    pairs: int
    detectable: tuple[float, ...]  # at each look of the gate, a fraction


@dataclass(frozen=True)
class Calibration:
    """What an A/A found. recommendations: for the loudest depth, one a wanted effect.

    is_crossover: the gate takes start order out of comparisons like this one.
    """

    launches: int
    depths: tuple[DepthNoise, ...]
    recommendations: tuple[Recommendation, ...]
    void_reasons: tuple[str, ...]
    is_crossover: bool = True

    @property
    def loudest(self) -> DepthNoise:
        """The depth that limits the gate."""
        return max(self.depths, key=lambda depth: depth.detectable[-1])


def calibrate(measured: Measured, config: GateConfig) -> Calibration:
    """Noise components and detectable effects of every depth; void reasons where the A/A cannot be used."""
    pairing = measured.pairing()
    if pairing.void_reasons or len(pairing.launches) < 2:
        reasons = pairing.void_reasons or ("noise components need at least two launches",)
        return Calibration(len(pairing.launches), (), (), reasons)
    orders = measured.candidate_second(pairing)
    depths = tuple(_depth_noise(pairs.depth, pairs.log_tpot_ratios(), orders, config) for pairs in pairing.depths)
    found = Calibration(len(pairing.launches), depths, (), (), orders is not None)
    recommendations = tuple(
        recommend(
            found.loudest.noise,
            effect,
            num_depths=len(depths),
            margin=config.margin,
            confidence=config.confidence,
            is_crossover=found.is_crossover,
        )
        for effect in WANTED_EFFECTS
    )
    return replace(found, recommendations=recommendations)


def found_noise(calibration: Calibration) -> Noise:
    """The loudest depth's components as a noise to simulate."""
    components = calibration.loudest.noise
    return Noise("as measured", launch=components.launch, request=components.request, order=components.order or 0.0)


def rule_of(config: GateConfig, depths: int | None = None, *, is_crossover: bool = True) -> GateRule:
    """The part of a gate's configuration that a simulation needs; engines that we start are a crossover."""
    return GateRule(
        depths=depths or len(config.depths),
        requests=config.requests_per_depth,
        margin=config.margin,
        confidence=config.confidence,
        looks=config.looks,
        is_crossover=is_crossover,
    )


def _depth_noise(
    depth: int, launches: list[Floats], candidate_second: Sequence[bool] | None, config: GateConfig
) -> DepthNoise:
    noise = noise_components(launches, candidate_second)
    detectable = tuple(
        detectable_effect(
            noise,
            launches=look,
            requests=config.requests_per_depth,
            num_depths=len(config.depths),
            margin=config.margin,
            confidence=config.confidence_of_a_look,
            is_crossover=candidate_second is not None,
        )
        for look in config.looks
    )
    return DepthNoise(depth, noise, sum(len(values) for values in launches), detectable)
