"""Reading off a socket: however TCP cuts an answer, the client makes the same of it; and no cut answer is whole."""

from time import perf_counter_ns

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernarc.harness.client.response_reader import Reading, read_answer
from kernarc.harness.client.timestamps import Arrival
from kernarc.harness.client.token_counts import count_tokens
from kernarc.harness.client.transcript import read_transcript
from kernarc.harness.config.models import LimitsConfig
from kernarc.harness.selftest.conformance.render import Asked, render, token_id, token_text
from kernarc.harness.selftest.conformance.shape import Cut, Framing, Shape, UsageAt, Words


class Pieces:
    """Arrivals that give these pieces and then the end, or nothing more."""

    def __init__(self, pieces: list[bytes], *, ends: bool = True) -> None:
        self._pieces = [*pieces, *([b""] if ends else [])]
        self.timeouts: list[float] = []

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0
        self.timeouts.append(seconds)

    def receive(self, kept: list[Arrival]) -> bytes:
        if not self._pieces:
            raise TimeoutError
        piece = self._pieces.pop(0)
        kept.append((perf_counter_ns(), (), piece))
        return piece

    def tokens_begin(self) -> None: ...

    def sent_stamp_ns(self) -> None:
        return None


def read(pieces: list[bytes], *, ends: bool = True, **limits: float) -> Reading:
    source = Pieces([piece for piece in pieces if piece], ends=ends)
    return read_answer(source, perf_counter_ns(), 3, LimitsConfig(**limits))


def split_at(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


SHAPES = st.builds(
    Shape,
    tokens=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    words=st.sampled_from(Words),
    usage=st.sampled_from([UsageAt.END, UsageAt.BESIDE, UsageAt.EVERY, UsageAt.AFTER_DONE]),
    cut=st.sampled_from([Cut.WHOLE, Cut.INTO_CHUNKS]),
    framing=st.sampled_from(Framing),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    comments=st.booleans(),
    is_chat=st.booleans(),
)
CUTS = st.lists(st.integers(min_value=0), max_size=40)


def answer_of(shape: Shape) -> bytes:
    asked = Asked(prompt_tokens=3, max_tokens=shape.tokens, is_chat=shape.is_chat, wants_ids=True, wants_usage=True)
    return b"".join(write.data for write in render(shape, asked))


@given(SHAPES, CUTS)
def test_any_split_of_an_answer_is_the_same_answer(shape: Shape, cuts: list[int]) -> None:
    reading = read(split_at(answer_of(shape), cuts), ends=shape.framing is Framing.CLOSE)
    assert reading.problem is None
    transcript = read_transcript(reading.pieces)
    events = count_tokens(transcript).events
    assert [token for event in events for token in event.token_ids] == [token_id(shape, j) for j in range(shape.tokens)]
    assert "".join(event.text for event in events) == "".join(token_text(shape, j) for j in range(shape.tokens))
    assert (transcript.prompt_tokens, transcript.completion_tokens) == (3, shape.tokens)
    assert transcript.saw_done
    assert reading.response.keep_alive is (shape.framing is not Framing.CLOSE)


@given(SHAPES.filter(lambda shape: shape.framing is not Framing.CLOSE), CUTS, st.integers(min_value=0))
def test_an_answer_that_is_cut_short_says_so(shape: Shape, cuts: list[int], length: int) -> None:
    whole = answer_of(shape)
    reading = read(split_at(whole[: length % len(whole)], cuts))
    assert "closed the connection" in (reading.problem or "")


@given(SHAPES, CUTS, st.integers(min_value=0))
def test_silence_is_a_problem_unless_the_stream_said_done(shape: Shape, cuts: list[int], length: int) -> None:
    whole = answer_of(shape)
    reading = read(split_at(whole[: length % len(whole)], cuts), ends=False)
    if reading.problem is None:
        assert read_transcript(reading.pieces).saw_done
    else:
        assert "no token" in reading.problem


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a","token_ids":[1]}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_limits_run_in_turn_first_token_then_stall() -> None:
    source = Pieces([HEAD, chunk(b": ping\n\n"), chunk(TOKEN)], ends=False)
    limits = LimitsConfig(first_token_s=100.0, first_token_s_per_1k_tokens=0.0, stall_s=7.0)
    reading = read_answer(source, perf_counter_ns(), 3, limits)
    assert all(99 < seconds <= 100 for seconds in source.timeouts[:3])
    assert source.timeouts[3:] == [7.0]
    assert reading.problem == "stalled: no token for 7 s"


def test_comment_lines_do_not_hold_a_stalled_stream() -> None:
    pieces = [HEAD, chunk(TOKEN), *[chunk(b": ping\n\n")] * 5]
    reading = read(pieces, ends=False, stall_s=1e-9)
    assert reading.problem == "stalled: no token for 1e-09 s"
    assert len(reading.pieces) == 2


def test_a_role_only_event_is_no_first_token() -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    reading = read([HEAD, chunk(role)], ends=False, first_token_s=60.0, first_token_s_per_1k_tokens=0.0)
    assert reading.problem == "no token within the limit of 60 s"


def test_the_whole_stream_has_a_limit() -> None:
    reading = read([HEAD, *[chunk(TOKEN)] * 50], stream_s=1e-6)
    assert reading.problem == "the whole stream took longer than its limit of 1e-06 s"


@pytest.mark.parametrize("key", ["text", "content", "reasoning", "reasoning_content", "arguments"])
def test_what_looks_like_a_first_token(key: str) -> None:
    source = Pieces([HEAD, chunk(b'data: {"%s": "x"}\n\n' % key.encode())], ends=False)
    read_answer(source, perf_counter_ns(), 3, LimitsConfig(stall_s=7.0))
    assert source.timeouts[-1] == 7.0
