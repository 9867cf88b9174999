"""Answers of the server over a decoder whose steps are known exactly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kernarc.decoder.checkpoint.chat_template import ChatTemplate
from kernarc.decoder.checkpoint.tokenizer import TextTokenizer
from kernarc.decoder.errors import RequestError

from ...fakes.live_server import EOS, LiveServer, ScriptedDecoder, small_tokenizer

LIBRARY = small_tokenizer()
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def ids_of(text: str) -> list[int]:
    """One token a character."""
    return [LIBRARY.encode(character).ids[0] for character in text]


@pytest.fixture
def ids_only() -> Iterator[LiveServer]:
    with LiveServer(ScriptedDecoder([[5], [6, 7, 8, 9], [10], [11, 12]])) as server:
        yield server


@pytest.fixture
def with_text() -> Iterator[LiveServer]:
    steps = [ids_of("a"), ids_of("b c "), LIBRARY.encode("é").ids, ids_of("END."), [EOS]]
    tokenizer = TextTokenizer(LIBRARY, ChatTemplate(CHAT, {}))
    with LiveServer(ScriptedDecoder(steps), tokenizer=tokenizer) as server:
        yield server


def choice(event: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = event["choices"][0]
    return found


def test_one_event_is_one_step(ids_only: LiveServer) -> None:
    events = ids_only.stream(prompt=[1, 2], max_tokens=8, return_token_ids=True)
    assert [choice(event)["token_ids"] for event in events] == [[5], [6, 7, 8, 9], [10], [11, 12]]
    assert [choice(event)["finish_reason"] for event in events] == [None, None, None, "length"]
    assert {choice(event)["text"] for event in events} == {""}
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({event["id"] for event in events}) == 1


def test_ids_only_on_request(ids_only: LiveServer) -> None:
    assert "token_ids" not in choice(ids_only.stream(prompt=[1])[0])


def test_usage_at_the_end(ids_only: LiveServer) -> None:
    events = ids_only.stream(prompt=[1, 2, 3], max_tokens=6, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert not any("usage" in event for event in events[:-1])


def test_usage_as_it_goes(ids_only: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = ids_only.stream(prompt=[1], max_tokens=8, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 5, 6, 8, 8]


def test_a_whole_answer_equals_its_stream(with_text: LiveServer) -> None:
    events = with_text.stream(prompt="x", return_token_ids=True)
    status, answer = with_text.post("/v1/completions", prompt="x", return_token_ids=True)
    assert status == 200
    assert choice(answer)["text"] == "".join(choice(event)["text"] for event in events) == "ab c éEND."
    assert choice(answer)["token_ids"] == [token for event in events for token in choice(event)["token_ids"]]
    assert choice(answer)["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(choice(answer)["token_ids"])


def test_stop_string_inside_a_step_trims_ids_and_text(with_text: LiveServer) -> None:
    events = with_text.stream(prompt="x", stop=["ND"], return_token_ids=True)
    assert "".join(choice(event)["text"] for event in events) == "ab c éE"
    assert choice(events[-1])["token_ids"] == ids_of("END")  # the full stop behind it is not sent
    assert (choice(events[-1])["finish_reason"], choice(events[-1])["stop_reason"]) == ("stop", "ND")


def test_stop_wins_over_the_cap_it_crosses(with_text: LiveServer) -> None:
    cap = 1 + 4 + 2 + 3  # ends exactly where "ND" is complete
    _, answer = with_text.post("/v1/completions", prompt="x", stop="ND", max_tokens=cap)
    assert (choice(answer)["finish_reason"], choice(answer)["text"]) == ("stop", "ab c éE")


def test_ignore_eos_and_a_cap_inside_a_step() -> None:
    with LiveServer(ScriptedDecoder([[5], [EOS, 6, 7, 8]])) as server:
        ended = server.stream(prompt=[1], return_token_ids=True)
        assert [choice(event)["token_ids"] for event in ended] == [[5], [EOS]]
        assert choice(ended[-1])["finish_reason"] == "stop"
        went_on = server.stream(prompt=[1], ignore_eos=True, max_tokens=4, return_token_ids=True)
        assert [choice(event)["token_ids"] for event in went_on] == [[5], [EOS, 6, 7]]
        assert choice(went_on[-1])["finish_reason"] == "length"


def test_stop_token_ids_end_without_text(with_text: LiveServer) -> None:
    _, answer = with_text.post("/v1/completions", prompt="x", stop_token_ids=ids_of("c"))
    assert (choice(answer)["text"], choice(answer)["finish_reason"]) == ("ab ", "stop")


def test_default_length_is_what_the_window_leaves() -> None:
    with LiveServer(ScriptedDecoder([[5]] * 100), max_context=20) as server:
        _, answer = server.post("/v1/completions", prompt=[1] * 17)
        assert answer["usage"]["completion_tokens"] == 3
        assert choice(answer)["finish_reason"] == "length"


def test_text_prompts_and_tokenize_agree(with_text: LiveServer) -> None:
    status, tokens = with_text.post("/tokenize", prompt="def main")
    assert (status, tokens["tokens"]) == (200, LIBRARY.encode("def main").ids)
    assert tokens["count"] == len(tokens["tokens"])
    _, answer = with_text.post("/v1/completions", prompt="def main", max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == tokens["count"]
    assert with_text.post("/detokenize", tokens=tokens["tokens"])[1]["prompt"] == "def main"


def test_chat(with_text: LiveServer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    events = with_text.stream("/v1/chat/completions", messages=messages)
    assert choice(events[0])["delta"] == {"role": "assistant", "content": "a"}
    assert "".join(choice(event)["delta"]["content"] for event in events) == "ab c éEND."
    status, answer = with_text.post("/v1/chat/completions", messages=messages, max_completion_tokens=1)
    assert (status, choice(answer)["message"]) == (200, {"role": "assistant", "content": "a"})
    assert answer["usage"]["prompt_tokens"] == len(LIBRARY.encode("[user]hi[assistant]").ids)


def test_metrics_count_what_was_sent(ids_only: LiveServer) -> None:
    ids_only.post("/v1/completions", prompt=[1, 2], max_tokens=7)  # steps of 1, 4, 1 and 2 cut to 1
    page = ids_only.request("GET", "/metrics")[2].decode()
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert values["kernarc_drafts_total"] == "3"
    assert values["kernarc_draft_tokens_total"] == "9"
    assert values["kernarc_accepted_tokens_total"] == "4"
    assert values["kernarc_committed_tokens_total"] == "7"
    assert values["kernarc_prefix_cache_hits_total"] == "0"
    assert values['kernarc_requests_total{ended="length"}'] == "1"


def test_models_and_health(ids_only: LiveServer) -> None:
    assert ids_only.request("GET", "/health")[0] == 200
    body = ids_only.request("GET", "/v1/models")[2].decode()
    assert '"id": "scripted"' in body
    assert '"max_model_len": 4096' in body


def test_one_stream_at_a_time_then_a_queue_then_429() -> None:
    gate = threading.Semaphore(0)
    with LiveServer(ScriptedDecoder([[5], [6]], gate=gate), queue_limit=1) as server:
        answers: list[tuple[int, Any]] = []

        def ask() -> None:
            answers.append(server.post("/v1/completions", prompt=[1], max_tokens=2))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.counters.running + server.counters.waiting == 2)
        status, headers, body = server.request("POST", "/v1/completions", {"prompt": [1]})
        assert (status, headers["retry-after"]) == (429, "1")
        assert b"queue is full" in body
        for _ in range(4):
            gate.release()
        for thread in threads:
            thread.join(10)
        assert [status for status, _ in answers] == [200, 200]
        assert server.counters.requests == {"refused": 1, "length": 2}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_decoder_within_a_step(stream: bool) -> None:
    gate = threading.Semaphore(1)
    decoder = ScriptedDecoder([[5]] * 1000, gate=gate)
    with LiveServer(decoder) as server:
        connection = server.connect()
        body = b'{"prompt": [1], "stream": %s}' % str(stream).lower().encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_for(lambda: decoder.steps_taken == 1)
        connection.close()
        wait_for(lambda: server.worker._running is None or server.worker._running.cancelled.is_set())
        gate.release()  # the step in progress ends, and no other begins
        wait_for(lambda: decoder.closed == 1)
        assert decoder.steps_taken == 2
        assert server.counters.requests == {"cancelled": 1}


def test_a_waiting_client_that_leaves_gives_up_its_place() -> None:
    gate = threading.Semaphore(0)
    decoder = ScriptedDecoder([[5]], gate=gate)
    with LiveServer(decoder, queue_limit=1) as server:
        first, second = server.connect(), server.connect()
        for connection, running in ((first, 1), (second, 2)):
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n" + b'{"prompt": [1]}'
            )
            wait_for(lambda running=running: server.counters.running + server.counters.waiting == running)
        second.close()
        wait_for(lambda: server.counters.waiting == 0)
        assert server.counters.requests == {"cancelled": 1}
        gate.release()
        assert first.recv(4096).startswith(b"HTTP/1.1 200")
        first.close()
        assert len(decoder.prompts) == 1


def test_a_failing_step_is_an_error_event_and_the_server_lives() -> None:
    decoder = ScriptedDecoder([[5], [6]], fail_at=1)
    with LiveServer(decoder) as server:
        _, _, body = server.request("POST", "/v1/completions", {"prompt": [1], "stream": True})
        assert b'"error": {"message": "planted failure"' in body
        assert b"[DONE]" not in body
        status, answer = server.post("/v1/completions", prompt=[1])
        assert (status, answer["error"]["message"]) == (500, "planted failure")
        decoder.fail_at = None
        assert server.post("/v1/completions", prompt=[1], max_tokens=1)[0] == 200


def test_a_request_that_only_the_decoder_refuses_is_the_clients_fault_even_in_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RequestError("the prompt is too long", "shorten it")

    decoder = ScriptedDecoder([[5]])
    monkeypatch.setattr(decoder, "generate", refuse)
    with LiveServer(decoder) as server:
        _, _, body = server.request("POST", "/v1/completions", {"prompt": [1], "stream": True})
        event = json.loads(body.partition(b"data: ")[2])
        assert (event["error"]["code"], event["error"]["type"]) == (400, "invalid_request_error")
        status, answer = server.post("/v1/completions", prompt=[1])
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert server.counters.requests == {"refused": 2}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_decoder_that_dies_unexpectedly_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ScriptedDecoder([[5]])
    with LiveServer(decoder) as server:
        monkeypatch.setattr(decoder, "generate", lambda *_, **__: 1 / 0)
        for _ in range(2):
            status, answer = server.post("/v1/completions", prompt=[1])
            assert (status, answer["error"]["type"]) == (500, "internal_error")
        assert server.request("GET", "/health")[0] == 503


def wait_for(condition: Any, limit_s: float = 10.0) -> None:
    """Until it is true."""
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)
