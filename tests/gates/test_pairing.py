"""A pair is two ok streams of one request in one launch; everything else is said and never passes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from kernarc.gates.pairing import Pairing, pair_streams
from kernarc.harness.run.records import StreamRecord, StreamStatus

MakeStream = Callable[..., StreamRecord]


def both(make_stream: MakeStream, **changes: object) -> list[StreamRecord]:
    return [
        make_stream(build, depth=depth, launch=launch, request=request, step_ms=step, **changes)
        for depth in (128, 256)
        for launch in range(3)
        for request in range(2)
        for build, step in (("a", 10.0), ("b", 11.0))
    ]


def pair(streams: list[StreamRecord], **changes: Any) -> Pairing:
    plan: dict[str, Any] = {
        "baseline": "a",
        "candidate": "b",
        "depths": (128, 256),
        "launches": (0, 1, 2),
        "requests_per_depth": 2,
    }
    return pair_streams(streams, **{**plan, **changes})


def test_whole_plan_pairs_up(make_stream: MakeStream) -> None:
    pairing = pair(both(make_stream))
    assert pairing.void_reasons == ()
    assert pairing.launches == (0, 1, 2)
    assert [depth.count for depth in pairing.depths] == [6, 6]
    for depth in pairing.depths:
        for ratios in depth.log_tpot_ratios():
            assert ratios == pytest.approx(math.log(1.1))


def test_effect_splits_exactly_into_step_and_tokens(make_stream: MakeStream) -> None:
    streams = [make_stream("a", step_ms=10, tokens_per_step=3), make_stream("b", step_ms=12, tokens_per_step=2)]
    found = pair(streams, depths=(128,), launches=(0,), requests_per_depth=1).depths[0]
    step, tokens, tpot = found.log_step_ratios(), found.log_tokens_per_step_ratios(), found.log_tpot_ratios()
    assert step is not None
    assert tokens is not None
    assert step[0][0] == pytest.approx(math.log(1.2))
    assert tokens[0][0] == pytest.approx(math.log(2 / 3))
    assert tpot[0][0] == pytest.approx(step[0][0] - tokens[0][0])


def test_events_that_are_not_steps_give_no_step_ratio(make_stream: MakeStream) -> None:
    found = pair(both(make_stream, events_are_steps=False)).depths[0]
    assert found.log_step_ratios() is None
    assert found.log_tokens_per_step_ratios() is None


@pytest.mark.parametrize("build", ["a", "b"])
def test_missing_stream_voids_and_names_the_request(make_stream: MakeStream, build: str) -> None:
    streams = both(make_stream)
    streams.remove(next(s for s in streams if (s.build, s.request_id) == (build, "d128-l1-r1")))
    [reason] = pair(streams).void_reasons
    assert "d128-l1-r1" in reason
    assert "has no stream" in reason


def test_a_request_absent_on_both_sides_voids(make_stream: MakeStream) -> None:
    streams = [s for s in both(make_stream) if s.request_id != "d256-l2-r0"]
    [reason] = pair(streams).void_reasons
    assert "depth 256" in reason


def test_void_stream_voids_with_its_own_reason(make_stream: MakeStream) -> None:
    streams = both(make_stream)
    bad = make_stream("b", request=0, status=StreamStatus.VOID, void_reason="engine died")
    streams = [bad if (s.build, s.request_id) == ("b", bad.request_id) else s for s in streams]
    assert "engine died" in pair(streams).void_reasons[0]


def test_a_stated_number_of_missing_pairs_is_allowed_and_no_more(make_stream: MakeStream) -> None:
    streams = [s for s in both(make_stream) if (s.build, s.request_id) != ("b", "d128-l0-r0")]
    assert pair(streams, max_missing_pairs_per_depth=1).void_reasons == ()
    streams = [s for s in streams if (s.build, s.request_id) != ("b", "d128-l0-r1")]
    assert pair(streams, max_missing_pairs_per_depth=1).void_reasons != ()


@pytest.mark.parametrize("ids", [(), (5,)])
def test_stream_without_a_time_per_token_is_no_pair(make_stream: MakeStream, ids: tuple[int, ...]) -> None:
    streams = both(make_stream)
    short = make_stream("b", token_ids=ids) if ids else make_stream("b").model_copy(update={"events": ()})
    streams = [short if (s.build, s.request_id) == ("b", short.request_id) else s for s in streams]
    assert "time per token is None" in pair(streams).void_reasons[0]


def test_zero_time_is_no_pair(make_stream: MakeStream) -> None:
    streams = both(make_stream)
    frozen = make_stream("b", step_ms=0.0)
    streams = [frozen if (s.build, s.request_id) == ("b", frozen.request_id) else s for s in streams]
    assert "time per token is None" in pair(streams).void_reasons[0]


def test_different_requests_are_no_pair(make_stream: MakeStream) -> None:
    streams = both(make_stream)
    other = make_stream("b").model_copy(update={"prompt_ids_sha256": "another prompt"})
    streams = [other if (s.build, s.request_id) == ("b", other.request_id) else s for s in streams]
    assert "different requests" in pair(streams).void_reasons[0]


def test_a_request_measured_twice_voids(make_stream: MakeStream) -> None:
    assert "two streams of d128-l0-r0" in pair([*both(make_stream), make_stream("b")]).void_reasons[0]


def test_copied_records_void(make_stream: MakeStream) -> None:
    streams = [
        make_stream(s.build, depth=s.depth, launch=s.launch, request=int(s.request_id[-1])) for s in both(make_stream)
    ]
    assert any("not measured" in reason for reason in pair(streams).void_reasons)


def test_nothing_at_all_voids() -> None:
    assert pair([]).void_reasons != ()
    assert pair([], depths=()).void_reasons != ()


def test_warmups_and_other_launches_do_not_count(make_stream: MakeStream) -> None:
    extra = [make_stream("a", is_warmup=True), make_stream("b", launch=7), make_stream("c")]
    pairing = pair([*both(make_stream), *extra])
    assert pairing.void_reasons == ()
    assert pairing.depths[0].count == 6


def test_blocks_voided_by_the_control_do_not_count_and_are_not_missing(make_stream: MakeStream) -> None:
    streams = both(make_stream)
    streams = [s.model_copy(update={"block": int(s.request_id[-1])}) for s in streams]
    pairing = pair(streams, void_blocks=frozenset({(1, 0)}))
    assert pairing.void_reasons == ()
    assert [len(pairs) for pairs in pairing.depths[0].launches] == [2, 1, 2]
