"""Starting and stopping: the port, the signals, what is logged."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket

import pytest
from aiohttp.http_exceptions import BadHttpMessage
from kernarc.decoder.errors import DecoderError
from kernarc.decoder.server.request import ServedModel
from kernarc.decoder.server.serve import _bind, _in_one_line, serve_decoder

from ...fakes.live_server import ScriptedDecoder

MODEL = ServedModel(("scripted",), 512, 4096, None)


def serve_on(listener: socket.socket, ready: list[str]) -> bool:
    def on_ready() -> None:
        ready.append("ready")
        os.kill(os.getpid(), signal.SIGTERM)

    return asyncio.run(serve_decoder(ScriptedDecoder([]), MODEL, listener, queue_limit=1, on_ready=on_ready))


def test_it_says_ready_once_and_stops_on_a_signal() -> None:
    ready: list[str] = []
    with _bind("127.0.0.1", 0) as listener:
        assert serve_on(listener, ready)
    assert ready == ["ready"]


def test_two_servers_that_bound_one_port_before_either_listened() -> None:
    with _bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with _bind("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(DecoderError, match=f"port {port} on 127.0.0.1 is in use"):
                serve_on(second, [])


def test_a_port_in_use_is_refused_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(DecoderError, match=f"port {port} on 127.0.0.1 is in use"):
            _bind("127.0.0.1", port)


def test_what_is_no_http_takes_one_line_of_log() -> None:
    error = BadHttpMessage("Invalid character in Content-Length:\n\n  b'-5'\n  ^")
    record = logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "Error", (), (type(error), error, None))
    assert _in_one_line(record)
    assert "\n" not in logging.Formatter().format(record)
    bug = logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "Error", (), (ValueError, ValueError("x"), None))
    assert _in_one_line(bug)
    assert "ValueError: x" in logging.Formatter().format(bug)
