"""Rounding in one place, and intervals of medians against what is known of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernarc.harness import format as fmt
from kernarc.reports.estimates import median_estimate
from scipy import stats


@pytest.mark.parametrize(("value", "printed"), [
    (0.4123, "0.412"), (7.145, "7.14"), (7.155, "7.16"), (11.9276, "11.93"), (123.44, "123.4"), (4711.2, "4,711"),
    (None, "–"), (0.9996, "1.000"),
])  # fmt: skip
def test_milliseconds(value: float | None, printed: str) -> None:
    assert fmt.milliseconds(value) == printed


def test_other_units() -> None:
    assert [fmt.depth_short(depth) for depth in (128, 1000, 1024, 8192, 65536, 1536)] == [
        "128", "1,000", "1K", "8K", "64K", "1,536",
    ]  # fmt: skip
    assert [fmt.speed_up(ratio) for ratio in (1.394, 2.995, 12.34, None)] == ["×1.39", "×3.00", "×12.3", "–"]
    assert [fmt.percent(change) for change in (0.0212, -0.003, 0.0004, None)] == ["+2.1 %", "−0.3 %", "0.0 %", "–"]
    assert [fmt.tokens_per_second(speed) for speed in (139.86, 1234.56, 12345.6)] == ["139.9", "1,234.6", "12,346"]
    assert [fmt.axis_number(value) for value in (0.0, 40.0, 2.5, 0.025, 1000.0)] == ["0", "40", "2.5", "0.025", "1,000"]
    assert fmt.milliseconds_interval(9.87, 10.4) == "9.87–10.40"
    assert fmt.model_name("/srv/models/tiny/") == "tiny"
    assert fmt.model_name("Qwen/Qwen3.8-27B-FP8") == "Qwen/Qwen3.8-27B-FP8"
    assert fmt.short_hashes(f"sha256 {'0123456789abcdef' * 4}, 2048") == "sha256 0123456789ab, 2048"


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_a_stored_number_prints_like_the_one_it_came_from(value: float) -> None:
    stored = fmt.settle(value)
    assert fmt.milliseconds(stored) == fmt.milliseconds(value)
    assert fmt.tokens_per_second(stored) == fmt.tokens_per_second(value)
    assert fmt.settle(stored) == stored


def test_the_interval_of_a_median_holds_it_19_times_in_20_without_launch_noise() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        values = rng.normal(10.0, 0.2, size=(5, 8))
        estimate = median_estimate({launch: list(row) for launch, row in enumerate(values)})
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= 10.0 <= estimate.high
    assert held >= 180


@pytest.mark.parametrize("launches", [2, 3, 5])
def test_the_interval_of_a_median_holds_it_19_times_in_20_with_launch_noise(launches: int) -> None:
    """Launches that differ by 2 %, as requests do: a bootstrap over two or three launches alone holds it 63 to 85 %."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        luck = rng.normal(0, 0.02, size=(launches, 1))
        values = 10 * np.exp(luck + rng.normal(0, 0.02, size=(launches, 8)))
        estimate = median_estimate({launch: list(row) for launch, row in enumerate(values)})
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= 10.0 <= estimate.high
    assert held >= 184


def test_the_order_of_requests_does_not_reach_an_interval() -> None:
    rng = np.random.default_rng(2)
    launches = {launch: list(rng.normal(10, 1, size=5 + launch)) for launch in range(4)}
    turned = {launch: launches[launch][::-1] for launch in reversed(launches)}
    assert median_estimate(launches) == median_estimate(turned)


def test_one_value_has_no_interval_and_none_has_no_estimate() -> None:
    single = median_estimate({0: [4.0]})
    assert single is not None
    assert (single.point_estimate, single.low, single.high) == (4.0, None, None)
    assert median_estimate({}) is None
    assert median_estimate({0: []}) is None


def test_launches_of_unequal_length_count_alike_and_reach_as_far_as_student_t() -> None:
    """Medians 2, 10 and 2.55; scipy's own interval of their logs is wider than any resample of these values."""
    estimate = median_estimate({0: [1.0, 2.0, 3.0], 1: [10.0], 2: [2.5, 2.6]})
    logs = np.log([2.0, 10.0, 2.55])
    low, high = np.exp(stats.t.interval(0.95, 2, loc=logs.mean(), scale=stats.sem(logs)))
    assert estimate is not None
    assert estimate.point_estimate == 2.55
    assert (estimate.low, estimate.high) == (pytest.approx(low), pytest.approx(high))


def test_one_launch_stays_within_its_values() -> None:
    estimate = median_estimate({4: [1.0, 2.0, 3.0, 10.0]})
    assert estimate is not None
    assert estimate.low is not None
    assert estimate.high is not None
    assert 1.0 <= estimate.low <= 2.5 <= estimate.high <= 10.0
