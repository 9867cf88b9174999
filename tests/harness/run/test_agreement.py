"""Where two builds' greedy ids part."""

from collections.abc import Callable

import pytest
from kernarc.harness.run.agreement import id_agreement
from kernarc.harness.run.records import StreamRecord, StreamStatus, TokenEvent

MakeStream = Callable[..., StreamRecord]


@pytest.fixture
def answer(stream: MakeStream) -> MakeStream:
    def make(build: str, request_id: str, ids: tuple[int, ...], **changes: object) -> StreamRecord:
        events = tuple(TokenEvent(t_ns=n, token_ids=(token,)) for n, token in enumerate(ids))
        return stream(request_id, build=build, events=events, **changes)

    return make


def test_equal_ids_however_they_were_grouped(answer: MakeStream, stream: MakeStream) -> None:
    grouped = stream("r0", build="b", events=(TokenEvent(t_ns=0, token_ids=(1, 2, 3)),))
    agreement = id_agreement([answer("a", "r0", (1, 2, 3)), grouped], "a", "b")
    assert (agreement.requests, agreement.equal, agreement.first_difference) == (1, 1, None)
    assert agreement.sentence() == "greedy ids of b and a: equal in all 1 requests"


@pytest.mark.parametrize(("ids", "position"), [((1, 9, 3), 1), ((1, 2), 2), ((1, 2, 3, 4), 3)])
def test_the_first_difference(ids: tuple[int, ...], position: int, answer: MakeStream) -> None:
    same = [answer("a", "r0", (1, 2, 3)), answer("b", "r0", (1, 2, 3))]
    streams = [*same, answer("a", "r1", (1, 2, 3)), answer("b", "r1", ids)]
    agreement = id_agreement(streams, "a", "b")
    assert (agreement.requests, agreement.equal, agreement.first_difference) == (2, 1, ("r1", position))
    assert f"first different in r1 at output token {position}" in agreement.sentence()


def test_void_streams_and_warm_ups_say_nothing(answer: MakeStream) -> None:
    streams = [
        answer("a", "r0", (1,)),
        answer("b", "r0", (2,), status=StreamStatus.VOID, void_reason="x"),
        answer("a", "w0", (1,), is_warmup=True),
        answer("b", "w0", (2,), is_warmup=True),
    ]
    assert "no request was answered with ids by both" in id_agreement(streams, "a", "b").sentence()
