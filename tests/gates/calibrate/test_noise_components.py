"""Variance components against noise of known size; detectable effects against the simulated gate."""

import math

import numpy as np
import pytest
from kernarc.gates.calibrate.noise import Noise
from kernarc.gates.calibrate.noise_components import NoiseComponents, detectable_effect, noise_components, recommend
from kernarc.gates.calibrate.simulate import GateRule, simulate_decisions


def test_components_of_known_noise_are_found() -> None:
    rng = np.random.default_rng(0)
    launches = [0.01 * rng.normal() + 0.02 * rng.normal(size=rng.integers(30, 50)) for _ in range(400)]
    found = noise_components(launches)
    assert found.launch == pytest.approx(0.01, rel=0.1)
    assert found.request == pytest.approx(0.02, rel=0.03)


def test_components_by_hand() -> None:
    """Launches (0, 2) and (4, 6): within 2, between 16, n₀ = 2, so launch² = (16 − 2)/2 = 7."""
    found = noise_components([np.array([0.0, 2.0]), np.array([4.0, 6.0])])
    assert found.request == pytest.approx(math.sqrt(2))
    assert found.launch == pytest.approx(math.sqrt(7))


def test_start_order_is_a_component_of_its_own_and_no_launch_noise() -> None:
    """With −3, +3, −3, +3 added, the launches (0, 2), (4, 6) of each order deviate as before: launch² = 7 still."""
    values = [np.array([0.0, 2.0]), np.array([0.0, 2.0]), np.array([4.0, 6.0]), np.array([4.0, 6.0])]
    second = [False, True, False, True]
    moved = [launch + (3 if is_second else -3) for launch, is_second in zip(values, second, strict=True)]
    found = noise_components(moved, second)
    assert found.order == pytest.approx(3)
    assert found.request == pytest.approx(math.sqrt(2))
    assert found.launch == pytest.approx(math.sqrt(7))
    # Launch means −2 and 2 around each order's own: s² = (4 · 4) / 2 = 8, error √(8/4 · (1/2 + 1/2)).
    assert found.order_error == pytest.approx(math.sqrt(2))
    assert noise_components(moved).order is None
    assert noise_components(moved).launch > 3


def test_components_of_unequal_launches_around_an_order_effect_are_found() -> None:
    rng = np.random.default_rng(4)
    second = [launch % 2 == 0 for launch in range(400)]
    launches = [
        (0.05 if is_second else -0.05) + 0.01 * rng.normal() + 0.02 * rng.normal(size=rng.integers(10, 60))
        for is_second in second
    ]
    found = noise_components(launches, second)
    assert found.order == pytest.approx(0.05, rel=0.03)
    assert found.launch == pytest.approx(0.01, rel=0.1)
    assert found.request == pytest.approx(0.02, rel=0.03)


def test_launch_noise_is_never_below_zero() -> None:
    assert noise_components([np.array([-1.0, 1.0]), np.array([1.0, -1.0])]).launch == 0


def test_one_launch_says_nothing() -> None:
    with pytest.raises(ValueError, match="two launches"):
        noise_components([np.array([0.0, 1.0])])


@pytest.mark.parametrize("order", [None, 0.0, -0.05])
def test_detectable_effect_is_what_the_simulated_gate_detects(order: float | None) -> None:
    """One depth, one look, so that the formula's case is the simulation's."""
    noise = NoiseComponents(launch=0.005, request=0.02, order=order)
    rule = GateRule(depths=1, requests=20, looks=(8,), n_resamples=1000, is_crossover=order is not None)
    effect = detectable_effect(
        noise,
        launches=8,
        requests=20,
        num_depths=1,
        margin=0.01,
        confidence=0.95,
        is_crossover=rule.is_crossover,
    )
    simulated = simulate_decisions(Noise("", launch=0.005, request=0.02, order=order or 0.0), rule, effect, 600, seed=0)
    assert simulated.failed == pytest.approx(0.9, abs=0.07)


def test_recommendation_sees_the_effect_and_is_not_larger_than_needed() -> None:
    noise = NoiseComponents(launch=0.01, request=0.02)
    rule = {"num_depths": 4, "margin": 0.01, "confidence": 0.95}
    advice = recommend(noise, 0.03, **rule)  # type: ignore[arg-type]
    assert advice.launches is not None
    seen = [
        detectable_effect(noise, launches=launches, requests=advice.requests, **rule)  # type: ignore[arg-type]
        for launches in (advice.launches - 1, advice.launches)
    ]
    assert seen[1] <= 0.03 < seen[0]
    assert recommend(NoiseComponents(launch=0.5, request=0.02), 0.03, **rule).launches is None  # type: ignore[arg-type]
