"""The formulas against streams whose times are known in closed form."""

from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernarc.harness.client.metrics import median_of, step_ms, tokens_per_second, tokens_per_step, tpot_ms, ttft_ms
from kernarc.harness.run.records import TokenEvent

MS = 1_000_000


@dataclass(frozen=True)
class Stream:
    events: tuple[TokenEvent, ...]
    sent_ns: int = 0
    events_are_steps: bool = True


def stream_of(times_ns: list[int], sizes: list[int], *, steps: bool = True, sent_ns: int = 0) -> Stream:
    events = tuple(TokenEvent(t_ns=t, token_ids=tuple(range(n))) for t, n in zip(times_ns, sizes, strict=True))
    return Stream(events, sent_ns, steps)


def batched(tokens: int, ns_per_token: int, sizes: list[int], start_ns: int) -> Stream:
    """Token j exists at start + j × ns_per_token; an event goes out with its last token."""
    ends = [end for end in accumulate(sizes) if end < tokens] + [tokens]
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return stream_of([start_ns + (end - 1) * ns_per_token for end in ends], counts, steps=False)


SIZES = st.lists(st.integers(1, 16), min_size=1, max_size=200)


@given(st.integers(40, 200), st.integers(1, 10**8), SIZES, st.integers(0, 10**12))
def test_tpot_does_not_depend_on_how_tokens_are_batched(tokens: int, ns: int, sizes: list[int], start: int) -> None:
    assert tpot_ms(batched(tokens, ns, sizes, start)) == pytest.approx(ns / MS, rel=1e-9)


@given(st.integers(0, 10**14), st.integers(1, 10**9))
def test_tpot_holds_nothing_of_the_first_token(ttft_ns: int, ns: int) -> None:
    stream = stream_of([ttft_ns + j * ns for j in range(64)], [1] * 64)
    assert ttft_ms(stream) == pytest.approx(ttft_ns / MS)
    assert tpot_ms(stream) == pytest.approx(ns / MS)


def test_ten_seconds_to_the_first_token_then_five_milliseconds() -> None:
    stream = stream_of([10_000 * MS + j * 5 * MS for j in range(256)], [1] * 256)
    assert (ttft_ms(stream), tpot_ms(stream)) == (10_000.0, 5.0)


def test_a_first_event_of_five_tokens_leaves_five_out_of_the_denominator() -> None:
    stream = stream_of([20 * MS] + [(20 + 5 * j) * MS for j in range(1, 97)], [5] + [1] * 96)
    assert tpot_ms(stream) == 5.0


def test_a_reply_of_two_tokens_is_one_interval() -> None:
    assert tpot_ms(stream_of([100 * MS, 107 * MS], [1, 1])) == 7.0


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=60), st.lists(st.integers(1, 9), min_size=61, max_size=61))
def test_time_per_token_is_time_per_step_over_tokens_per_step(gaps: list[int], sizes: list[int]) -> None:
    stream = stream_of([0, *accumulate(gaps)], sizes[: len(gaps) + 1])
    step, per_step, tpot = step_ms(stream), tokens_per_step(stream), tpot_ms(stream)
    assert step is not None
    assert per_step is not None
    assert tpot == pytest.approx(step / per_step)
    assert step == pytest.approx(sum(gaps) / len(gaps) / MS)


@given(st.integers(2, 40), st.integers(3, 12), st.integers(10**6, 10**7), st.integers(0, 20_000))
def test_a_flush_of_n_events_is_timed_by_its_first_burst(flush: int, bursts: int, ns: int, spread: int) -> None:
    """Token j exists at j × ns, but n of them are written at the time of the last, each write `spread` ns after."""
    times = [(flush * (burst + 1) - 1) * ns + within * spread for burst in range(bursts) for within in range(flush)]
    stream = stream_of(times, [1] * len(times), steps=False)
    longer_by = (flush - 1) * spread / (flush * (bursts - 1))
    assert tpot_ms(stream) == pytest.approx((ns + longer_by) / MS, rel=1e-9)
    assert step_ms(stream) is None
    assert tokens_per_step(stream) is None


def test_steps_that_were_joined_with_the_first_leave_the_denominators() -> None:
    """The first three were read together and have the third one's stamp: 20 ms a step of two tokens all the same."""
    stream = stream_of([40 * MS] * 3 + [60 * MS, 80 * MS, 100 * MS], [2] * 6)
    assert (tpot_ms(stream), step_ms(stream), tokens_per_step(stream)) == (10.0, 20.0, 2.0)
    all_at_once = stream_of([40 * MS] * 3, [2] * 3)
    assert (tpot_ms(all_at_once), step_ms(all_at_once), tokens_per_step(all_at_once)) == (None, None, None)


def test_counts_without_ids_count() -> None:
    events = tuple(TokenEvent(t_ns=t * MS, token_ids=(), counted_tokens=2) for t in (0, 10, 20))
    assert tpot_ms(Stream(events)) == 5.0


@pytest.mark.parametrize(
    ("times", "sizes"), [([], []), ([5], [1]), ([5], [7])], ids=["nothing", "one-token", "one-event"]
)
def test_what_is_not_defined_is_none(times: list[int], sizes: list[int]) -> None:
    stream = stream_of(times, sizes)
    assert (tpot_ms(stream), step_ms(stream), tokens_per_step(stream)) == (None, None, None)
    assert (ttft_ms(stream) is None) is (not times)


def test_events_that_all_came_at_once_have_no_time_per_token() -> None:
    assert tpot_ms(stream_of([5, 5, 5], [1, 1, 1], steps=False)) is None


def test_median_leaves_the_undefined_out() -> None:
    assert median_of([None, 3.0, 1.0, None, 2.0]) == 2.0
    assert median_of([None]) is None
    assert tokens_per_second(4.0) == 250.0
