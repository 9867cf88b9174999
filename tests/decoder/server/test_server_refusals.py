"""Every bad request gets a 4xx that says what is wrong, and the next good one is answered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kernarc.decoder.checkpoint.chat_template import ChatTemplate
from kernarc.decoder.checkpoint.tokenizer import TextTokenizer
from kernarc.decoder.server.server import MAX_BODY_BYTES

from ...fakes.live_server import LiveServer, ScriptedDecoder, small_tokenizer


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(ScriptedDecoder([[5], [6, 7]]), vocab_size=100, max_context=64) as live:
        yield live
        assert live.post("/v1/completions", prompt=[1], max_tokens=3)[0] == 200


@pytest.fixture(scope="module")
def text_server() -> Iterator[LiveServer]:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    tokenizer = TextTokenizer(small_tokenizer(), ChatTemplate(template, {}))
    with LiveServer(ScriptedDecoder([[5]]), tokenizer=tokenizer) as live:
        yield live


OK = {"prompt": [1]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "no prompt"),
    ({"prompt": None}, "no prompt"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": [[]]}, "prompt is empty"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": "hello"}, "no tokenizer"),
    ({"prompt": 7}, "prompt is 7, expected a string or a list of token ids"),
    ({"prompt": [1, 100]}, "prompt[1] is 100, expected an id from 0 to 99"),
    ({"prompt": [-1]}, "prompt[0] is -1"),
    ({"prompt": [True]}, "prompt[0] is 'True', expected a token id"),
    ({"prompt": [1.0]}, "prompt[0] is '1.0'"),
    ({"prompt": [1, None]}, "prompt[1] is 'None'"),
    ({"prompt": [1] * 5000 + [False]}, "prompt[5000] is 'False', expected a token id"),
    ({"prompt": [1] * 5000 + [2.0]}, "prompt[5000] is '2.0', expected a token id"),
    ({"prompt": [1] * 5000 + [-2, 1]}, "prompt[5000] is -2, expected an id from 0 to 99"),
    ({"prompt": [1] * 5000 + [[1]]}, "several prompts"),
    ({"prompt": [10**400]}, "prompt[0] is 1000"),
    ({"prompt": [[1], [2]]}, "several prompts"),
    ({"prompt": ["a", "b"]}, "several prompts"),
    ({"prompt": [1] * 64}, "the prompt has 64 tokens"),
    ({"prompt": [1] * 60, "max_tokens": 5}, "60 prompt tokens leave 4 of a window of 64"),
    (OK | {"max_tokens": 0}, "max_tokens is 0, expected an integer of at least 1"),
    (OK | {"max_tokens": True}, "max_tokens is True"),
    (OK | {"max_tokens": 1.5}, "max_tokens is 1.5"),
    (OK | {"max_tokens": 10**30}, "leave 63 of a window of 64"),
    (OK | {"temperature": 0.7}, "temperature is 0.7, expected 0: this decoder is greedy"),
    (OK | {"temperature": "0"}, "temperature is '0'"),
    (OK | {"top_p": 0.9}, "top_p is 0.9, expected 1"),
    (OK | {"top_k": 40}, "top_k is 40"),
    (OK | {"n": 2}, "n is 2, expected 1: one sequence is decoded at a time"),
    (OK | {"best_of": 2}, "best_of is 2"),
    (OK | {"logprobs": 1}, "logprobs is 1, expected absent"),
    (OK | {"echo": True}, "echo is True"),
    (OK | {"frequency_penalty": 1}, "frequency_penalty is 1"),
    (OK | {"logit_bias": {"5": 100}}, "logit_bias"),
    (OK | {"min_tokens": 5}, "min_tokens is 5"),
    (OK | {"seed": "x"}, "seed is 'x'"),
    (OK | {"stop": ""}, "stop is ''"),
    (OK | {"stop": [1]}, "stop is [1]"),
    (OK | {"stop": ["x"]}, "no tokenizer"),
    (OK | {"stop_token_ids": [100]}, "stop_token_ids[0] is 100"),
    (OK | {"stream": 1}, "stream is 1, expected true or false"),
    (OK | {"stream_options": {"include": True}}, "stream_options"),
    (OK | {"max_token": 5}, "unknown field 'max_token', did you mean 'max_tokens'?"),
    (OK | {"response_format": {"type": "json_object"}}, "response_format"),
]


@pytest.mark.parametrize(("body", "said"), BAD, ids=[str(place) for place in range(len(BAD))])
def test_a_bad_field_is_refused_by_name(server: LiveServer, body: dict[str, Any], said: str) -> None:
    status, answer = server.post("/v1/completions", **body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert said in answer["error"]["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 0},
        {"temperature": 0.0, "top_p": 1, "top_k": -1, "min_p": 0.0, "n": 1, "seed": 7},
        {"temperature": None, "max_tokens": None, "stop": None, "logprobs": None},
        {"presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "user": "me"},
        {"model": "scripted", "stream": False, "stream_options": {"include_usage": False}},
        {"prompt": [[1]]},
    ],
)
def test_what_greedy_decoding_means_is_taken(server: LiveServer, field: dict[str, Any]) -> None:
    assert server.post("/v1/completions", **(OK | field))[0] == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"prompt": [NaN]}', "NaN is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": [1' + b"0" * 5000 + b"]}", "not valid JSON"),
    ],
)
def test_bad_json(server: LiveServer, body: bytes, said: str) -> None:
    status, _, answer = server.request("POST", "/v1/completions", body)
    assert status == 400
    assert said in json.loads(answer)["error"]["message"]


def test_unknown_model_path_and_method(server: LiveServer) -> None:
    status, answer = server.post("/v1/completions", model="gpt", prompt=[1])
    assert (status, answer["error"]["message"]) == (404, "no model 'gpt' is served here; this server has 'scripted'")
    assert server.post("/v1/embeddings", input="x")[0] == 404
    status, headers, _ = server.request("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")


def test_chat_and_tokenize_need_a_tokenizer(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert "no chat template" in server.post("/v1/chat/completions", messages=messages)[1]["error"]["message"]
    assert "no tokenizer" in server.post("/tokenize", prompt="x")[1]["error"]["message"]
    assert server.post("/tokenize", prompt=[1])[0] == 400


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is []"),
        (["hi"], "messages[0] is not an object with a role"),
        ([{"content": "hi"}], "messages[0] is not an object with a role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "not text"),
        ([{"role": "system", "content": "x"}], "no system role"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
        ([{"role": "user", "content": ""}], "prompt is empty"),
    ],
)
def test_bad_messages(text_server: LiveServer, messages: Any, said: str) -> None:
    status, answer = text_server.post("/v1/chat/completions", messages=messages)
    assert status == 400
    assert said in answer["error"]["message"]


def test_a_lone_surrogate_in_a_prompt(text_server: LiveServer) -> None:
    status, answer = text_server.post("/v1/completions", prompt="a\ud800")
    assert (status, answer["error"]["message"]) == (
        400,
        "the text is not valid Unicode at character 1: a lone surrogate",
    )


def test_a_huge_body_is_refused_before_it_is_sent(server: LiveServer) -> None:
    with server.connect() as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n"
        connection.sendall(head + b"Expect: 100-continue\r\n\r\n")
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b'"message": "the request body is over 16 MiB"' in answer
    with server.connect() as connection:
        connection.sendall(head + b"\r\n" + b"x" * 1000)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_huge_body_without_a_length_is_cut_off(server: LiveServer) -> None:
    started = time.monotonic()
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        sent = 0
        try:
            while sent < 100:
                connection.sendall(chunk)
                sent += 1
        except OSError:
            pass
    assert sent < 2 * MAX_BODY_BYTES / len(chunk) or time.monotonic() - started < 10
    assert server.request("GET", "/health")[0] == 200


def test_a_large_prompt_of_ids_is_no_huge_body() -> None:
    with LiveServer(ScriptedDecoder([[5]]), vocab_size=1000000, max_context=262144) as server:
        status, answer = server.post("/v1/completions", prompt=[999999] * 262143)
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 262143)
