"""A request as the bytes that are sent."""

import json
from collections.abc import Container

from .completion import CompletionRequest

# Fields beyond OpenAI's own, in the order in which they are given up where a server refuses the request over them.
OPTIONAL_FIELDS = ("continuous_usage_stats", "return_token_ids", "ignore_eos")


def completion_payload(request: CompletionRequest, given_up: Container[str]) -> tuple[str, bytes]:
    """Path and JSON body of a streamed greedy request, without the optional fields that were given up."""
    stream_options: dict[str, object] = {"include_usage": True}
    payload: dict[str, object] = {
        "model": request.model,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": stream_options,
    }
    if request.seed is not None:
        payload["seed"] = request.seed
    if "continuous_usage_stats" not in given_up:
        stream_options["continuous_usage_stats"] = True
    if "return_token_ids" not in given_up:
        payload["return_token_ids"] = True
    if request.ignore_eos and "ignore_eos" not in given_up:
        payload["ignore_eos"] = True
    if request.messages:
        payload["messages"] = [{"role": message.role, "content": message.content} for message in request.messages]
        return "/v1/chat/completions", json.dumps(payload).encode()
    payload["prompt"] = list(request.prompt_ids)
    return "/v1/completions", json.dumps(payload).encode()


def http_post(host: str, path: str, body: bytes, api_key: str | None) -> bytes:
    """Head and body of one HTTP/1.1 request."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Accept-Encoding: identity",
        f"Content-Length: {len(body)}",
    ]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
