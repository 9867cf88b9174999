"""The client on a real socket: limits, connections, refusals, and what it leaves alone while it reads."""

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from kernarc.harness.client.chat_prompt import fit_chat_prompt
from kernarc.harness.client.client import CompletionRequest, StreamingClient, StreamOutcome
from kernarc.harness.client.connection import Connection
from kernarc.harness.config.models import LimitsConfig
from kernarc.harness.errors import ConfigError, VoidMeasurementError
from kernarc.harness.run.records import StreamStatus
from kernarc.harness.selftest.conformance.process import ConformanceServer

EVENT = b'data: {"choices":[{"index":0,"text":"a","token_ids":[7],"finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
BODY = EVENT + USAGE + b"data: [DONE]\n\n"
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
REQUEST = CompletionRequest(prompt_ids=(1, 2, 3), max_tokens=1)
Play = Callable[[socket.socket], None]


@contextmanager
def server_that(*plays: Play) -> Iterator[tuple[str, list[bytes]]]:
    """Accepts one connection for each play, in order; gives the URL and the bytes of every first read."""
    listener = socket.create_server(("127.0.0.1", 0))
    received: list[bytes] = []

    def serve() -> None:
        for play in plays:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                received.append(connection.recv(65_536))
                play(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", received
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes the accept
        listener.close()
        thread.join(timeout=5)


def answers(data: bytes) -> Play:
    return lambda connection: connection.sendall(data)


def complete(url: str, **options: float) -> StreamOutcome:
    with StreamingClient(url, **options) as client:  # type: ignore[arg-type]
        return client.complete(REQUEST)


def test_a_good_stream() -> None:
    with server_that(answers(GOOD)) as (url, received):
        outcome = complete(url)
    assert (outcome.status, outcome.void_reason, outcome.token_ids, outcome.text) == (StreamStatus.OK, None, (7,), "a")
    assert outcome.connect_ns > 0
    assert outcome.sent_ns < outcome.events[0].t_ns <= outcome.ended_ns
    assert received[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")


def test_a_base_url_may_hold_v1_and_a_prefix() -> None:
    with server_that(answers(GOOD)) as (url, received):
        complete(f"{url}/models/a/v1/")
    assert received[0].startswith(b"POST /models/a/v1/completions HTTP/1.1\r\n")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:99999"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"URL|port"):
        StreamingClient(url)


def test_nobody_listening_is_void() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    outcome = complete(f"http://127.0.0.1:{port}")
    assert outcome.status is StreamStatus.VOID
    assert "cannot connect" in (outcome.void_reason or "")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "without an answer"),
        (b"HTTP/1.1 200", "in the middle of the response head"),
        (b"SSH-2.0\r\n\r\n", "not an HTTP/1.1 response"),
        (GOOD[:-20], "in the middle of the body"),
        (b"HTTP/1.1 500 no\r\nContent-Length: 4\r\n\r\noops", "HTTP 500: oops"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "no tokens came"),
        (
            b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n{"choices":[]}',
            "did not stream",
        ),
    ],
)
def test_broken_answers_are_void_and_never_asked_again(answer: bytes, reason: str) -> None:
    with server_that(answers(answer)) as (url, received):
        outcome = complete(url)
    assert outcome.status is StreamStatus.VOID
    assert reason in (outcome.void_reason or "")
    assert len(received) == 1


def test_a_connection_that_closed_while_idle_is_opened_anew() -> None:
    with server_that(answers(GOOD), answers(GOOD)) as (url, received), StreamingClient(url) as client:
        first = client.complete(REQUEST)
        time.sleep(0.05)
        second = client.complete(REQUEST)
    assert (first.status, second.status) == (StreamStatus.OK, StreamStatus.OK)
    assert min(first.connect_ns, second.connect_ns) > 0
    assert second.sent_ns > first.ended_ns
    assert len(received) == 2


def test_a_connection_that_closes_in_the_face_of_a_request_is_void_and_not_asked_again() -> None:
    def one_answer_then_close_on_the_next_request(connection: socket.socket) -> None:
        connection.sendall(GOOD)
        connection.recv(65_536)

    with (
        server_that(one_answer_then_close_on_the_next_request, answers(GOOD)) as (url, received),
        StreamingClient(url) as client,
    ):
        client.complete(REQUEST)
        second = client.complete(REQUEST)
        asked = len(received)
    assert second.status is StreamStatus.VOID
    assert asked == 1


def test_a_connection_that_takes_no_byte_is_opened_anew_and_the_request_sent_once() -> None:
    with server_that(answers(GOOD), answers(GOOD)) as (url, received):
        connection = Connection(url, connect_s=5.0, idle_reuse_s=60.0)
        connection.open_if_needed()
        connection.socket.shutdown(socket.SHUT_WR)  # from here on a send fails before its first byte
        sent_ns, reconnect_ns = connection.send(b"POST / HTTP/1.1\r\n\r\n")
        assert connection.socket.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
    assert reconnect_ns > 0
    assert sent_ns > 0
    assert received == [b"", b"POST / HTTP/1.1\r\n\r\n"]


def test_a_compressed_stream_is_void() -> None:
    with server_that(answers(GOOD.replace(b"OK\r\n", b"OK\r\nContent-Encoding: gzip\r\n"))) as (url, _):
        assert "compressed" in (complete(url).void_reason or "")


def test_a_refusal_over_something_else_gives_no_field_up() -> None:
    message = b'{"error":{"message":"prompt too long; got return_token_ids, continuous_usage_stats and ignore_eos"}}'
    refusal = b"HTTP/1.1 400 no\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(message), message)
    with server_that(*[answers(refusal)] * 4, answers(GOOD)) as (url, received), StreamingClient(url) as client:
        refused = client.complete(REQUEST)
        good = client.complete(REQUEST)
    assert "prompt too long" in (refused.void_reason or "")
    assert good.status is StreamStatus.OK
    assert b"return_token_ids" not in received[3]
    assert b"return_token_ids" in received[4]


def test_a_kept_connection_costs_nothing(conformance_server: ConformanceServer) -> None:
    with StreamingClient(conformance_server.url("cached-none")) as client:
        request = CompletionRequest(prompt_ids=tuple(range(8)), max_tokens=4)
        outcomes = [client.complete(request) for _ in range(3)]
    assert [outcome.connect_ns > 0 for outcome in outcomes] == [True, False, False]


def test_an_old_idle_connection_is_not_trusted(conformance_server: ConformanceServer) -> None:
    with StreamingClient(conformance_server.url("cached-none"), idle_reuse_s=0.05) as client:
        request = CompletionRequest(prompt_ids=tuple(range(8)), max_tokens=4)
        client.complete(request)
        time.sleep(0.1)
        assert client.complete(request).connect_ns > 0


def test_garbage_collection_rests_while_a_stream_is_read_and_only_then() -> None:
    seen: list[bool] = []

    def look(connection: socket.socket) -> None:
        time.sleep(0.05)
        seen.append(gc.isenabled())
        connection.sendall(GOOD)

    with server_that(look) as (url, _):
        complete(url)
    assert seen == [False]
    assert gc.isenabled()


def test_a_busy_server_is_asked_again_so_often_and_no_more(conformance_server: ConformanceServer) -> None:
    busy = b"HTTP/1.1 429 no\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfull"
    with server_that(*[answers(busy)] * 3) as (url, received):
        outcome = complete(url, busy_retries=2, busy_wait_s=0.01)
    assert outcome.void_reason == "HTTP 429: full"
    assert outcome.refusals == ("HTTP 429: full",) * 2
    assert len(received) == 3


def test_what_came_before_a_stall_is_kept(conformance_server: ConformanceServer) -> None:
    with StreamingClient(conformance_server.url("stall"), LimitsConfig(stall_s=0.2)) as client:
        outcome = client.complete(CompletionRequest(prompt_ids=tuple(range(8)), max_tokens=64))
    assert outcome.status is StreamStatus.VOID
    assert len(outcome.events) == 1


def test_the_first_token_may_take_longer_at_depth(conformance_server: ConformanceServer) -> None:
    limits = LimitsConfig(first_token_s=0.05, first_token_s_per_1k_tokens=10.0)
    assert limits.first_token_limit_s(100) == pytest.approx(1.05)
    with StreamingClient(conformance_server.url("same-prompt-twice"), limits) as client:  # 0.2 s to the first token
        short = client.complete(CompletionRequest(prompt_ids=tuple(range(5)), max_tokens=4))
        long = client.complete(CompletionRequest(prompt_ids=tuple(range(100)), max_tokens=4))
    assert short.void_reason == "no token within the limit of 0.1 s"
    assert long.status is StreamStatus.OK


def test_chat_prompts_are_trimmed_to_the_depth(conformance_server: ConformanceServer) -> None:
    with StreamingClient(conformance_server.url("chat-template")) as client:
        (message,) = fit_chat_prompt(client, "m", "some words " * 100, depth=64)
        assert len(message.content.split()) == 64 - 13
        with pytest.raises(VoidMeasurementError, match="no cut of the text gives a chat prompt of 5000 tokens"):
            fit_chat_prompt(client, "m", "few words", depth=5000)
    with (
        StreamingClient(conformance_server.url("chat-template-unmeasured")) as client,
        pytest.raises(VoidMeasurementError, match="no /tokenize"),
    ):
        fit_chat_prompt(client, "m", "some words", depth=64)
