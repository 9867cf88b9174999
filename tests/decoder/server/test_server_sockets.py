"""The server against raw sockets: partial and pipelined requests, old HTTP, slow and leaving clients."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import BinaryIO, cast

import pytest
from kernarc.decoder.server import stream_writer

from ...fakes.live_server import LiveServer, ScriptedDecoder
from .test_server import wait_for


def request_bytes(max_tokens: int) -> bytes:
    body = b'{"prompt": [1], "max_tokens": %d, "stream": true, "return_token_ids": true}' % max_tokens
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


REQUEST = request_bytes(3)


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer(ScriptedDecoder([[5], [6, 7]])) as live:
        yield live


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while not data.endswith(mark):
        more = connection.recv(65536)
        assert more, data
        data += more
    return data


def read_chunked(stream: BinaryIO) -> bytes:
    """The body of the next answer."""
    assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
    while stream.readline() != b"\r\n":
        pass
    body = b""
    while size := int(stream.readline(), 16):
        body += stream.read(size)
        assert stream.read(2) == b"\r\n"
    assert stream.readline() == b"\r\n"
    return body


def test_a_request_byte_by_byte(server: LiveServer) -> None:
    with server.connect() as connection:
        for place in range(len(REQUEST)):
            connection.sendall(REQUEST[place : place + 1])
        assert b"data: [DONE]" in read_until(connection, b"0\r\n\r\n")


def test_pipelined_requests_are_answered_in_order(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(REQUEST * 3)
        data = b""
        while data.count(b"[DONE]") < 3 or not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(65536)
    assert data.count(b"HTTP/1.1 200 OK") == 3
    assert data.count(b'"token_ids": [6, 7]') == 3


def test_each_event_is_one_chunk_and_one_write(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(REQUEST)
        data = read_until(connection, b"0\r\n\r\n")
    body = data.split(b"\r\n\r\n", 1)[1]
    chunks = []
    while body:
        size, rest = body.split(b"\r\n", 1)
        chunks.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    assert chunks.pop() == b""
    assert [chunk.count(b"data: ") for chunk in chunks] == [1, 2]  # the last step carries the end mark
    assert json.loads(chunks[0][6:])["choices"][0]["token_ids"] == [5]


def test_http_1_0_gets_an_unframed_stream_and_a_closed_connection(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        data = b""
        while more := connection.recv(65536):
            data += more
    head, body = data.split(b"\r\n\r\n", 1)
    assert b"chunked" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: " + b"x" * 100_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_the_server_lives(server: LiveServer, garbage: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(garbage)
        answer = connection.recv(65536)
        assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert server.request("GET", "/health")[0] == 200


def test_a_body_that_does_not_decode(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(REQUEST.replace(b"Host: x", b"Host: x\r\nContent-Encoding: gzip"))
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"the request body cannot be read" in answer
    assert len(server.stream(prompt=[1], max_tokens=3)) == 2


def test_a_request_cut_off_in_its_body(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(REQUEST[:-10])
    assert len(server.stream(prompt=[1], max_tokens=3)) == 2


def test_a_client_may_leave_right_after_the_end_mark(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        with server.connect() as connection:
            connection.sendall(REQUEST)
            data = b""
            while b"[DONE]" not in data:
                data += connection.recv(65536)
    wait_for(lambda: server.counters.requests == {"length": 20})
    assert "Traceback" not in caplog.text


def test_a_reset_in_the_middle_of_a_stream() -> None:
    gate = threading.Semaphore(1)
    decoder = ScriptedDecoder([[5]] * 100, gate=gate)
    with LiveServer(decoder) as server:
        connection = server.connect()
        connection.sendall(request_bytes(90))
        connection.recv(65536)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()  # sends RST
        for _ in range(100):
            gate.release()
        wait_for(lambda: server.counters.requests == {"cancelled": 1})
        assert decoder.steps_taken < 100
        assert server.request("GET", "/health")[0] == 200


def test_a_client_that_reads_slowly_gets_everything() -> None:
    steps = [[7] * 16 for _ in range(20_000)]  # 6 MB, more than the sockets hold
    with LiveServer(ScriptedDecoder(steps), max_context=1_000_000) as server, server.connect() as connection:
        connection.sendall(request_bytes(320_000))
        wait_for(lambda: server.counters.committed_tokens > 1000)
        time.sleep(0.3)  # the decoder runs into full buffers and waits
        assert server.counters.committed_tokens < 320_000
        data = read_until(connection, b"0\r\n\r\n")
    assert data.count(b"data: {") == 20_000


def test_pipelined_long_answers_stay_in_order() -> None:
    steps = [[7] * 16 for _ in range(2_000)]
    with LiveServer(ScriptedDecoder(steps), max_context=100_000) as server, server.connect() as connection:
        connection.sendall(request_bytes(32_000) * 2)
        stream = connection.makefile("rb")
        for _ in range(2):
            events = read_chunked(stream).split(b"\n\n")
            assert (len(events), events[-2:]) == (2_002, [b"data: [DONE]", b""])


def test_events_wait_for_what_the_loop_holds_back() -> None:
    """The headers may wait in the loop behind the last answer's end: events must not overtake them."""
    near, far = socket.socketpair()

    class Transport:
        held = 3

        def get_extra_info(self, name: str) -> socket.socket:
            return near

        def get_write_buffer_size(self) -> int:
            self.held -= 1
            return self.held

        def is_closing(self) -> bool:
            return False

    transport = Transport()
    writer = stream_writer.StreamWriter(cast(asyncio.Transport, transport), chunked=True)
    sender = threading.Thread(target=writer.send, args=(b"data: x\n\n", threading.Event()))
    sender.start()
    asyncio.run(writer.open())
    sender.join(10)
    assert transport.held == 0
    assert far.recv(100) == b"9\r\ndata: x\n\n\r\n"
    writer.close()
    near.close()
    far.close()


def test_a_client_that_stops_reading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_writer, "STALL_LIMIT_S", 0.3)
    decoder = ScriptedDecoder([[7] * 16 for _ in range(200_000)])
    with LiveServer(decoder, max_context=10_000_000) as server, server.connect() as connection:
        connection.sendall(request_bytes(3_200_000))
        wait_for(lambda: server.counters.requests == {"cancelled": 1}, limit_s=30)
        assert decoder.steps_taken < 200_000
        assert server.post("/v1/completions", prompt=[1], max_tokens=16)[0] == 200
