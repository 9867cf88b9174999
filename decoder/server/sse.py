"""The JSON of OpenAI-compatible answers: whole ones, and server-sent events assembled from text prepared once."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from .request import GenerationRequest

DONE = b"data: [DONE]\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object; nothing is ever taken from a cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def error_body(message: str, kind: str, code: int) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_event(message: str, kind: str, code: int) -> bytes:
    """The event that ends a stream which cannot go on."""
    return b"data: " + json.dumps(error_body(message, kind, code)).encode() + b"\n\n"


class AnswerFormat:
    """Everything about one answer that is known before its first token."""

    def __init__(self, request: GenerationRequest, model: str) -> None:
        self._request = request
        kind = "chat.completion" if request.is_chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if request.is_chat else "cmpl-") + uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        streamed = self._head | ({"object": "chat.completion.chunk"} if request.is_chat else {})
        self._event_start = "data: " + json.dumps(streamed)[:-1] + ', "choices": ['
        self._choice_start = '{"index": 0, "logprobs": null, '
        self._is_first = True

    def event(
        self, token_ids: Sequence[int], text: str, completion_tokens: int, finish: str | None, stopped_by: str | None
    ) -> bytes:
        """One decoder step as one server-sent event. completion_tokens: counted up to and with this step."""
        request = self._request
        quoted = json.dumps(text)
        if request.is_chat:
            role = '"role": "assistant", ' if self._is_first else ""
            self._is_first = False
            choice = f'{self._choice_start}"delta": {{{role}"content": {quoted}}}'
        else:
            choice = f'{self._choice_start}"text": {quoted}'
        if request.return_token_ids:
            choice += f', "token_ids": {list(token_ids)}'
        reason = f'"{finish}"' if finish else "null"
        choice += f', "finish_reason": {reason}, "stop_reason": {json.dumps(stopped_by)}}}]'
        if request.continuous_usage:
            choice += f', "usage": {self._usage_json(completion_tokens)}'
        return f"{self._event_start}{choice}}}\n\n".encode()

    def last_events(self, completion_tokens: int) -> bytes:
        """What follows the last step: the usage where it was asked for, and the end mark."""
        if not self._request.include_usage:
            return DONE
        return f'{self._event_start}], "usage": {self._usage_json(completion_tokens)}}}\n\n'.encode() + DONE

    def answer(self, token_ids: Sequence[int], text: str, finish: str | None, stopped_by: str | None) -> dict[str, Any]:
        """The whole answer of a request that does not stream."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": stopped_by}
        if self._request.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if self._request.return_token_ids:
            choice["token_ids"] = list(token_ids)
        counts = usage(len(self._request.prompt_ids), len(token_ids))
        return self._head | {"choices": [choice], "usage": counts}

    def _usage_json(self, completion_tokens: int) -> str:
        """usage() as JSON, put together by hand because it may be wanted at every step."""
        prompt = len(self._request.prompt_ids)
        return (
            f'{{"prompt_tokens": {prompt}, "completion_tokens": {completion_tokens}, '
            f'"total_tokens": {prompt + completion_tokens}, "prompt_tokens_details": {{"cached_tokens": 0}}}}'
        )
