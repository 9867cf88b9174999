"""Streamed text equals the tokenizers library's decode of the whole output, however it is cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernarc.decoder.checkpoint.tokenizer import TextTokenizer
from kernarc.decoder.streaming_text import CharacterStream, StopScanner, TextStream

from ..fakes.live_server import TEXT, small_tokenizer

LIBRARY = small_tokenizer()
TOKENIZER = TextTokenizer(LIBRARY)
END, X = (LIBRARY.encode(text).ids[0] for text in ("<|end|>", "x"))
ANY_IDS = st.lists(st.integers(0, LIBRARY.get_vocab_size() + 5), max_size=40)


def one_a_character(text: str) -> list[int]:
    return [LIBRARY.encode(character).ids[0] for character in text]


def streamed(ids: list[int], *, skip_special_tokens: bool = True) -> str:
    stream = CharacterStream(TOKENIZER, skip_special_tokens=skip_special_tokens)
    return "".join(stream.push(token_id) for token_id in ids) + stream.finish()


@given(ids=ANY_IDS, skip=st.booleans())
def test_a_stream_of_any_ids_equals_the_full_decode(ids: list[int], skip: bool) -> None:
    assert streamed(ids, skip_special_tokens=skip) == LIBRARY.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60))
def test_text_comes_back_whole(text: str) -> None:
    assert streamed(LIBRARY.encode(text).ids) == text


@pytest.mark.parametrize("text", TEXT)
def test_no_piece_ends_inside_a_character(text: str) -> None:
    stream = CharacterStream(TOKENIZER)
    pieces = [stream.push(token_id) for token_id in LIBRARY.encode(text).ids]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    assert "" in pieces  # a token that completes no character shows nothing yet


STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3)


@given(text=st.text("ab<", max_size=30), stops=STOPS, data=st.data())
def test_stop_strings_do_not_depend_on_how_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    scanner = StopScanner(stops)
    shown = ""
    for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += scanner.push(text[first:last])
    shown += scanner.finish()
    found = [match.start() + len(stop) for stop in stops for match in re.finditer(f"(?={re.escape(stop)})", text)]
    if not found:
        assert (shown, scanner.matched) == (text, None)
    else:
        whole = text[: min(found)]
        longest = max((stop for stop in stops if whole.endswith(stop)), key=len)
        assert (shown, scanner.matched) == (whole.removesuffix(longest), longest)


def test_a_stop_string_trims_ids_and_text_in_the_middle_of_a_step() -> None:
    ids = one_a_character("xyEND!!")
    stream = TextStream(TOKENIZER, stops=["END"])
    first, second = stream.push(ids[:3]), stream.push(ids[3:])
    assert (first.text, first.token_ids) == ("xy", tuple(ids[:3]))  # E is held back, its id is not
    assert (second.text, second.token_ids, second.stopped_by) == ("", tuple(ids[3:5]), "END")


def test_what_was_held_back_is_shown_when_it_was_no_stop_string() -> None:
    stream = TextStream(TOKENIZER, stops=["END"])
    shown = stream.push(one_a_character("EN")).text
    assert (shown, stream.finish()) == ("", ("EN", None))


def test_the_token_that_ends_the_output_is_not_text() -> None:
    stream = TextStream(TOKENIZER, silent_ids=frozenset({X, END}), skip_special_tokens=False)
    assert stream.push([X, END]).text == ""


def test_without_a_tokenizer_ids_pass_and_text_is_empty() -> None:
    stream = TextStream(None)
    assert (stream.push([1, 2]).token_ids, stream.push([3]).text, stream.finish()) == ((1, 2), "", ("", None))
