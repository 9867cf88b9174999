"""Reading a request: the few HTTP and JSON parts that a case depends on."""

import hashlib
import json
from dataclasses import dataclass
from socket import socket

from .case import Case
from .cases import CASES
from .render import Asked

Json = dict[str, object]


@dataclass(frozen=True)
class HttpRequest:
    """One request as read from the socket."""

    method: str
    path: str
    body: bytes


class BadRequestError(ValueError):
    """A request that the server answers with 400 and this message."""


def read_request(connection: socket, buffered: bytes) -> tuple[HttpRequest | None, bytes]:
    """Returns the next request, None where the client has gone, and the bytes read beyond it."""
    data = buffered
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65_536)
        if not piece:
            return None, b""
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    method, path, *_ = (*lines[0].split(" "), "", "")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    length = int(headers.get("content-length", "0") or "0")
    pieces, have = [rest], len(rest)
    while have < length:
        piece = connection.recv(1 << 20)
        if not piece:
            return None, b""
        pieces.append(piece)
        have += len(piece)
    whole = b"".join(pieces)
    return HttpRequest(method, path, whole[:length]), whole[length:]


def case_of(path: str, payload: Json, default: Case) -> tuple[Case, str]:
    """The case a request is for, by its path's first part or its model, and the path without that part."""
    first, _, rest = path.lstrip("/").partition("/")
    if first in CASES:
        return CASES[first], f"/{rest}"
    return CASES.get(str(payload.get("model")), default), path


def parse_json(body: bytes) -> Json:
    """The body as an object. Raises BadRequestError."""
    try:
        value: object = json.loads(body or b"{}")
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequestError("the body is not a JSON object")
    return value


def asked_of(payload: Json, case: Case, *, is_chat: bool) -> Asked:
    """What the request asks for. Raises BadRequestError."""
    options = payload.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequestError("stream_options is not an object")
    if case.refused_field is not None and (case.refused_field in payload or case.refused_field in options):
        raise BadRequestError(f"unknown field: {case.refused_field}")
    max_tokens = payload.get("max_tokens", payload.get("max_completion_tokens", 16))
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise BadRequestError(f"max_tokens is {max_tokens!r}")
    ids = None if is_chat else payload.get("prompt")
    prompt_ids = tuple(ids) if isinstance(ids, list) and all(isinstance(i, int) for i in ids) else None
    return Asked(
        prompt_tokens=count_prompt(payload, case),
        max_tokens=max_tokens,
        is_chat=is_chat,
        prompt_ids=prompt_ids,
        wants_ids=payload.get("return_token_ids") is True,
        wants_usage=options.get("include_usage") is True,
    )


def count_prompt(payload: Json, case: Case) -> int:
    """Ids count one each, words of a text one each, a chat the words of its messages and the template's tokens."""
    messages = payload.get("messages")
    if isinstance(messages, list):
        words = sum(len(str(message.get("content", "")).split()) for message in messages if isinstance(message, dict))
        return words + case.shape.wrapper_tokens
    prompt = payload.get("prompt", "")
    return len(prompt) if isinstance(prompt, list) else len(str(prompt).split())


def prompt_digest(payload: Json) -> str:
    """Of the prompt as it arrived: ids comma-joined, or the JSON of what else it is."""
    prompt = payload.get("prompt", payload.get("messages"))
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        text = ",".join(map(str, prompt))
    else:
        text = json.dumps(prompt)
    return hashlib.sha256(text.encode()).hexdigest()
