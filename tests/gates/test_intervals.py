"""The fast bootstrap against a slow twin of plain loops, and the t interval against its textbook value."""

import math
import random
import statistics

import numpy as np
import pytest
from kernarc.gates.bootstrap import (
    Floats,
    launch_means,
    max_t_half_widths,
    pad_launches,
    preview_interval,
    resampled_means,
    resampling_weights,
)
from kernarc.gates.intervals import depth_intervals, student_half_widths


def noise(depths: int, launches: list[int], seed: int = 0) -> list[list[Floats]]:
    rng = np.random.default_rng(seed)
    return [[0.005 * rng.normal() + rng.normal(0, 0.02, count) for count in launches] for _ in range(depths)]


def slow_two_level_bootstrap(data: list[list[Floats]], confidence: float, n_resamples: int) -> list[float]:
    """The half widths by plain loops and Python's own random numbers."""
    random.seed(11)
    resamples: list[list[float]] = [[] for _ in data]
    for _ in range(n_resamples):
        launches = [random.randrange(len(data[0])) for _ in data[0]]
        for depth, values in enumerate(data):
            means = [
                statistics.fmean(random.choices(list(values[launch]), k=len(values[launch]))) for launch in launches
            ]
            resamples[depth].append(statistics.fmean(means))
    estimates = [statistics.fmean(float(launch.mean()) for launch in values) for values in data]
    errors = [statistics.stdev(values) for values in resamples]
    largest = sorted(
        max(abs(resamples[depth][b] - estimates[depth]) / errors[depth] for depth in range(len(data)))
        for b in range(n_resamples)
    )
    critical = largest[math.ceil(confidence * (n_resamples - 1))]
    return [critical * error for error in errors]


@pytest.mark.parametrize("launches", [[12, 12, 12], [7, 12, 9, 12]], ids=["equal", "ragged"])
def test_bootstrap_agrees_with_the_slow_twin(launches: list[int]) -> None:
    data = noise(2, launches)
    fast = depth_intervals(data, confidence=0.95, n_resamples=20_000, seed=1)
    slow = slow_two_level_bootstrap(data, 0.95, 4_000)
    for interval, half_width in zip(fast, slow, strict=True):
        assert interval.bootstrap_half_width == pytest.approx(half_width, rel=0.06)


def test_bootstrap_standard_error_is_the_closed_form() -> None:
    """Var(mean*) = Σ over launches of ((mean_l − mean)² + s_l²/n_l) / L², s_l² with divisor n_l."""
    data = noise(1, [10, 14, 8, 12], seed=5)
    values, counts = pad_launches(data)
    weights = resampling_weights(counts, 14, 60_000, seed=2)
    means = launch_means(values, counts)[0]
    within = [launch.var() / len(launch) for launch in data[0]]
    expected = math.sqrt(sum((mean - means.mean()) ** 2 + var for mean, var in zip(means, within, strict=True))) / 4
    assert resampled_means(values, weights)[0].std() == pytest.approx(expected, rel=0.015)


def test_weights_sum_to_one_and_leave_padding_alone() -> None:
    weights = resampling_weights(np.array([[3, 5], [5, 2]]), 5, 1000, seed=0)
    assert weights.shape == (2, 1000, 10)
    assert weights.sum(axis=-1) == pytest.approx(1)
    assert weights.reshape(2, 1000, 2, 5)[0, :, 0, 3:].max() == 0
    assert weights.reshape(2, 1000, 2, 5)[1, :, 1, 2:].max() == 0


def test_launches_are_drawn_jointly_for_all_depths() -> None:
    """With no noise but the launch's, two depths that share it move together in every resample."""
    shared = [np.full(4, value) for value in (-0.01, 0.0, 0.02)]
    values, counts = pad_launches([shared, shared])
    drawn = resampled_means(values, resampling_weights(counts, 4, 500, seed=3))
    assert drawn[0] == pytest.approx(drawn[1])


def test_simultaneous_interval_is_wider_than_a_single_one() -> None:
    one = depth_intervals(noise(1, [20] * 8), confidence=0.95, n_resamples=20_000, seed=0)[0]
    four = depth_intervals(
        noise(1, [20] * 8) + noise(3, [20] * 8, seed=9), confidence=0.95, n_resamples=20_000, seed=0
    )[0]
    assert four.bootstrap_half_width > 1.1 * one.bootstrap_half_width


def test_student_half_width_is_the_textbook_value() -> None:
    """t(0.975, 4) = 2.776; with two depths Bonferroni takes t(0.9875, 4) = 3.495."""
    means = np.array([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert student_half_widths(means, 0.95)[0] == pytest.approx(2.7764 * math.sqrt(2.5) / math.sqrt(5), rel=1e-4)
    assert student_half_widths(np.repeat(means, 2, axis=0), 0.95)[0] == pytest.approx(3.4954 * math.sqrt(0.5), rel=1e-4)


def test_the_wider_decides() -> None:
    few = depth_intervals(noise(2, [20] * 3), confidence=0.95, n_resamples=5_000, seed=0)[0]
    assert few.half_width == few.student_half_width > few.bootstrap_half_width
    flat = [
        [launch - launch.mean() for launch in noise(1, [10] * 10)[0]]
    ]  # all launch means equal: t says nothing moves
    many = depth_intervals(flat, confidence=0.95, n_resamples=5_000, seed=0)[0]
    assert many.half_width == many.bootstrap_half_width > many.student_half_width


def test_one_launch_has_no_deciding_interval() -> None:
    [interval] = depth_intervals(noise(1, [20]), confidence=0.95, n_resamples=1_000, seed=0)
    assert math.isnan(interval.half_width)
    assert math.isnan(interval.low)


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        depth_intervals([[np.array([0.0, math.nan])]], confidence=0.95, n_resamples=1_000, seed=0)
    with pytest.raises(ValueError, match="needs a pair"):
        resampling_weights(np.array([[3, 0]]), 3, 10, seed=0)


def test_same_seed_same_interval() -> None:
    data = noise(2, [8] * 4)
    assert depth_intervals(data, confidence=0.9, n_resamples=1_000, seed=4) == depth_intervals(
        data, confidence=0.9, n_resamples=1_000, seed=4
    )


def test_a_depth_without_any_variation_leaves_the_others_alone() -> None:
    estimates = np.array([0.0, 0.0])
    moving = np.random.default_rng(0).normal(size=4000)
    widths = max_t_half_widths(estimates, np.stack([np.zeros(4000), moving]), 0.95)
    assert widths[0] == 0
    assert widths[1] == pytest.approx(1.96, rel=0.05)


def test_preview_needs_three_pairs_and_brackets_the_mean() -> None:
    ratios = np.random.default_rng(0).normal(0.03, 0.02, 20)
    preview = preview_interval(ratios, 0.95, 2_000, seed=0)
    assert preview is not None
    assert preview[0] < ratios.mean() < preview[1]
    assert preview_interval(ratios[:2], 0.95, 2_000, seed=0) is None
    assert preview_interval(np.zeros(9), 0.95, 2_000, seed=0) is None
