"""The HTTP response reader against Python's own, whole and in any split."""

import http.client
import io
import socket
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernarc.harness.client.http import MAX_HEAD_BYTES, HttpFramingError, ResponseReader

BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=8)


class OneAnswerSocket:
    """What http.client wants of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def standard_library_body(data: bytes) -> bytes:
    response = http.client.HTTPResponse(cast("socket.socket", OneAnswerSocket(data)))
    response.begin()
    return response.read()


def read(pieces: list[bytes]) -> tuple[ResponseReader, bytes]:
    reader = ResponseReader()
    return reader, b"".join(reader.feed(piece) for piece in pieces)


def split_at(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def chunked(parts: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    body = b"".join(b"%X%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n" + trailer + b"\r\n"


@given(BODIES, st.lists(st.integers(min_value=0), max_size=40), st.sampled_from([b"", b";a=b"]), st.booleans())
def test_chunks_in_any_split(parts: list[bytes], cuts: list[int], extension: bytes, has_trailer: bool) -> None:
    data = chunked(parts, extension, b"X-Sum: 1\r\n" if has_trailer else b"")
    reader, body = read(split_at(data, cuts))
    assert body == standard_library_body(data)
    assert (reader.complete, reader.keep_alive, reader.leftover) == (True, True, b"")


@given(st.binary(max_size=200), st.lists(st.integers(min_value=0), max_size=20), st.binary(max_size=5))
def test_a_content_length_ends_the_body(body: bytes, cuts: list[int], beyond: bytes) -> None:
    data = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    reader, read_body = read([*split_at(data, cuts), beyond])
    assert read_body == body == standard_library_body(data)
    assert reader.complete
    assert reader.leftover == beyond
    assert reader.keep_alive is (beyond == b"")


@given(st.binary(max_size=200), st.lists(st.integers(min_value=0), max_size=20))
def test_a_body_until_the_connection_closes(body: bytes, cuts: list[int]) -> None:
    reader, read_body = read(split_at(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + body, cuts))
    assert not reader.complete
    reader.end_of_connection()
    assert read_body == body
    assert (reader.complete, reader.keep_alive) == (True, False)


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=4), st.integers(min_value=0))
def test_a_cut_answer_is_never_complete(parts: list[bytes], cut: int) -> None:
    data = chunked(parts)
    reader, _ = read([data[: cut % len(data)]])
    assert not reader.complete
    with pytest.raises(HttpFramingError, match="closed the connection"):
        reader.end_of_connection()


@given(st.binary(max_size=300), st.lists(st.integers(min_value=0), max_size=10))
def test_no_bytes_do_anything_but_parse_or_be_refused(data: bytes, cuts: list[int]) -> None:
    try:
        read(split_at(data, cuts))
        read(split_at(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + data, cuts))
    except HttpFramingError:
        return


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "not an HTTP/1.1 response"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "not an HTTP/1.1 response"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "without a colon"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "not a number"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n", "not a chunk size"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0x5\r\n", "not a chunk size"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd\r\n", "longer than its size"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * (MAX_HEAD_BYTES + 1), "without an end"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES, "longer than"),
    ],
)
def test_refusals_say_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(HttpFramingError, match=message):
        read([data])


def test_interim_answers_are_skipped() -> None:
    data = b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    reader, body = read([data])
    assert (reader.status, body) == (200, b"ok")
    assert "link" not in reader.headers


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\ncontent-length: 0", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0", False),
        (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 0", True),
        (b"HTTP/1.1 204 No Content", True),
    ],
)
def test_when_a_connection_may_be_kept(head: bytes, keeps: bool) -> None:
    reader, _ = read([head + b"\r\n\r\n"])
    assert reader.keep_alive is keeps
