"""Start order taken out of the estimate: against scipy's pooled two-sample t, a closed form, and effects put in."""

import math

import numpy as np
import pytest
from kernarc.gates.bootstrap import Floats, pad_launches, resampled_means, resampling_weights
from kernarc.gates.crossover import LaunchDesign, candidate_second
from kernarc.gates.intervals import depth_intervals
from kernarc.harness.run.records import RunManifest
from scipy import stats

from .conftest import made_up_run_manifest

ORDERS = [True, False, True, False, True]


def noise(count: int, pairs: int = 12, seed: int = 0) -> list[Floats]:
    rng = np.random.default_rng(seed)
    return [0.005 * rng.normal() + rng.normal(0, 0.02, pairs) for _ in range(count)]


def with_order(launches: list[Floats], orders: list[bool], effect: float) -> list[Floats]:
    """Being started second makes an engine slower by `effect`, in log units."""
    return [values + (effect if second else -effect) for values, second in zip(launches, orders, strict=True)]


@pytest.mark.parametrize("orders", [ORDERS, [False, False, False, True], [True, False] * 6])
def test_an_order_effect_of_any_size_changes_nothing(orders: list[bool]) -> None:
    base = noise(len(orders))
    plain, moved = (
        depth_intervals(
            [with_order(base, orders, effect)], confidence=0.95, n_resamples=2_000, seed=1, candidate_second=orders
        )[0]
        for effect in (0.0, -0.05)
    )
    assert plain.order_effect is not None
    assert moved.order_effect == pytest.approx(plain.order_effect - 0.05)
    assert moved.point_estimate == pytest.approx(plain.point_estimate)
    assert moved.student_half_width == pytest.approx(plain.student_half_width)
    assert moved.bootstrap_half_width == pytest.approx(plain.bootstrap_half_width)


def test_without_start_orders_five_launches_keep_a_fifth_of_the_effect() -> None:
    """What the crossover is for."""
    launches = with_order([np.zeros(4)] * 5, ORDERS, -0.05)
    plain = depth_intervals([launches], confidence=0.95, n_resamples=1_000, seed=0)[0]
    assert plain.point_estimate == pytest.approx(-0.05 / 5)
    assert plain.order_effect is None


def test_student_interval_is_scipys_two_sample_t() -> None:
    """m₁ + m₂ is the difference between the one order's means and the other's, turned round."""
    launches = noise(5, seed=3)
    means = np.array([values.mean() for values in launches])
    second = np.array(ORDERS)
    expected = stats.ttest_ind(means[second], -means[~second], equal_var=True).confidence_interval(0.95)
    found = depth_intervals([launches], confidence=0.95, n_resamples=1_000, seed=0, candidate_second=ORDERS)[0]
    assert found.point_estimate - found.student_half_width == pytest.approx(expected.low / 2)
    assert found.point_estimate + found.student_half_width == pytest.approx(expected.high / 2)


def test_stratified_bootstrap_error_is_the_closed_form() -> None:
    """Var(mean*) = Σ over orders of (variance of the launch means + mean variance of a launch mean) / 4n."""
    data = noise(7, pairs=9, seed=5)
    strata = np.array([0, 1, 0, 1, 0, 1, 0])
    values, counts = pad_launches([data])
    weights = resampling_weights(counts, 9, 60_000, 2, strata)
    variance = 0.0
    for stratum in (0, 1):
        own = [launch for launch, of in zip(data, strata, strict=True) if of == stratum]
        between = np.var([launch.mean() for launch in own])
        within = np.mean([launch.var() / len(launch) for launch in own])
        variance += (between + within) / (4 * len(own))
    drawn = resampled_means(values, weights)[0]
    assert drawn.std() == pytest.approx(math.sqrt(variance), rel=0.015)
    assert drawn.mean() == pytest.approx(LaunchDesign(strata).estimates(np.array([x.mean() for x in data])), abs=1e-4)


def test_a_resample_holds_both_orders_in_their_own_numbers() -> None:
    strata = np.array([0, 1, 0, 1, 0])
    counts = np.full((1, 5), 4)
    weights = resampling_weights(counts, 4, 500, 0, strata).reshape(500, 5, 4).sum(axis=-1)
    assert weights[:, strata == 0].sum(axis=-1) == pytest.approx(0.5)
    assert weights[:, strata == 1].sum(axis=-1) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("orders", "launches", "is_crossover", "degrees_of_freedom"),
    [
        (ORDERS, 5, True, 3),
        ([True, False, True, False], 4, True, 2),
        ([True, False, True], 3, False, 2),
        ([True, False], 2, False, 1),
        ([True], 1, False, 0),
        ([True, True, True, True], 4, False, 3),
        (None, 5, False, 4),
    ],
)
def test_the_rule_is_fixed_by_the_orders_alone(
    orders: list[bool] | None, launches: int, is_crossover: bool, degrees_of_freedom: int
) -> None:
    design = LaunchDesign.of(orders, launches)
    assert (design.is_crossover, design.degrees_of_freedom) == (is_crossover, degrees_of_freedom)
    assert design.weights.sum() == pytest.approx(1)


def test_reach_by_hand() -> None:
    """t(0.975, 3) = 3.1824 and √((1/3 + 1/2)/4) = 0.45644; plain t(0.975, 4)/√5 = 1.24165."""
    assert LaunchDesign.alternating(5).reach(0.95, 1) == pytest.approx(3.18245 * 0.456435, rel=1e-5)
    assert LaunchDesign.plain(5).reach(0.95, 1) == pytest.approx(1.24165, rel=1e-4)
    assert math.isnan(LaunchDesign.plain(1).reach(0.95, 1))


@pytest.mark.parametrize(("launches", "wider"), [(5, 1.38), (8, 1.07), (12, 1.03)])
def test_what_taking_it_out_costs_where_there_is_none(launches: int, wider: float) -> None:
    of_a_look = 1 - 0.05 / 3
    ratio = LaunchDesign.alternating(launches).reach(of_a_look, 4) / LaunchDesign.plain(launches).reach(of_a_look, 4)
    assert ratio == pytest.approx(wider, abs=0.005)


def test_orders_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="4 start orders for 5 launches"):
        LaunchDesign.of([True, False, True, False], 5)


def endpoints(manifest: RunManifest, *engines: str, residency: str = "both") -> RunManifest:
    builds = tuple(
        build.model_copy(update={"engine": engine}) for build, engine in zip(manifest.builds, engines, strict=True)
    )
    return manifest.model_copy(update={"builds": builds, "residency": residency})


def test_start_order_is_the_plans_and_absent_where_we_start_nothing() -> None:
    ours = made_up_run_manifest(("a", "b", "c"))
    assert candidate_second(ours, "a", "b", [0, 1, 2, 4]) == (True, False, True, True)
    assert candidate_second(ours, "b", "a", [0, 1]) == (False, True)
    pair = made_up_run_manifest()
    assert candidate_second(endpoints(pair, "kernarc", "endpoint"), "a", "b", [0, 1, 2]) is None
    # One engine after the other: then the measuring itself has an order.
    alternate = endpoints(pair, "endpoint", "endpoint", residency="alternate")
    assert candidate_second(alternate, "a", "b", [0, 1, 2]) == (True, False, True)
