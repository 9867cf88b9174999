"""The event-stream parser against the grammar, whole and in any split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernarc.harness.client.sse import SseDecoder, SseEvent


def decode(pieces: list[bytes]) -> list[SseEvent]:
    decoder = SseDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


def by_the_grammar(stream: str) -> list[SseEvent]:
    """A second reading of the grammar: the whole text at once, line by line."""
    text = stream.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    events: list[SseEvent] = []
    data: list[str] = []
    kind = ""
    for line in text.split("\n")[:-1]:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if line == "":
            if data:
                events.append(SseEvent("\n".join(data), kind or "message"))
            data, kind = [], ""
        elif name == "data":
            data.append(value)
        elif name == "event":
            kind = value
    return events


def split_at(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(stream) + 1) for cut in cuts})
    return [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]


LINES = st.one_of(
    st.builds(
        "data:{}{}".format,
        st.sampled_from(["", " ", "  "]),
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=8),
    ),
    st.builds(":{}".format, st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=4)),
    st.sampled_from(["", "", "", "event: error", "id: 7", "retry: 10", "data", "nonsense"]),
)
STREAMS = st.builds(
    lambda lines, mark: mark + "".join(line + end for line, end in lines),
    st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r\n", "\r"])), max_size=20),
    st.sampled_from(["", "\ufeff"]),
)


@given(STREAMS, st.lists(st.integers(min_value=0), max_size=30))
def test_any_split_gives_the_events_of_the_grammar(stream: str, cuts: list[int]) -> None:
    assert decode(split_at(stream.encode(), cuts)) == by_the_grammar(stream)


@given(STREAMS)
def test_single_bytes_give_the_events_of_the_grammar(stream: str) -> None:
    data = stream.encode()
    assert decode([data[i : i + 1] for i in range(len(data))]) == by_the_grammar(stream)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
def test_an_event_is_out_with_the_byte_that_ends_it(end: str) -> None:
    decoder = SseDecoder()
    assert decoder.feed(f"data: a{end}".encode()) == []
    assert decoder.feed(end[:1].encode()) == [SseEvent("a")]
    assert decoder.feed(f"{end[1:]}data: b{end}{end}".encode()) == [SseEvent("b")]


def test_one_space_after_the_colon_is_not_data_and_a_second_is() -> None:
    assert decode([b"data:  two spaces \n\n"]) == [SseEvent(" two spaces ")]


def test_a_last_event_without_its_blank_line_is_left_for_finish() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: [DONE]") == []
    assert decoder.finish() == SseEvent("[DONE]")
    assert decoder.finish() is None
