"""From a shape and a request to the bytes of the answer, each with its due time and the tokens it completes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from .shape import Break, Framing, Shape, UsageAt, Words
from .tcp_writes import Write, cut_into_writes

_UNICODE_WORDS = (" é", " 日本", " 🙂", " ñandú")
_PROTOCOL_WORDS = ("data: [DONE]\n\n", '"token_ids":[7]', "\r\n0\r\n\r\n", ': "error"}')
_OPEN_ENDS = (Break.CLOSE, Break.RESET, Break.STALL, Break.PINGS, Break.EMPTY_EVENTS, Break.DRIP)
PINGS = 100
PING_MS = 50
Json = dict[str, object]


@dataclass(frozen=True)
class Asked:
    """What the server needs to know of a request. prompt_ids is None for chat and text prompts."""

    prompt_tokens: int
    max_tokens: int
    is_chat: bool = False
    prompt_ids: tuple[int, ...] | None = None
    wants_ids: bool = False
    wants_usage: bool = False


def token_text(shape: Shape, token: int) -> str:
    """The text of token number `token` of an answer."""
    if shape.words is Words.SPACES:
        return " "
    if shape.words is Words.UNICODE:
        return _UNICODE_WORDS[token % len(_UNICODE_WORDS)]
    if shape.words is Words.PROTOCOL:
        return _PROTOCOL_WORDS[token % len(_PROTOCOL_WORDS)]
    return f" w{token}"


def token_id(shape: Shape, token: int) -> int:
    """The id of token number `token` of an answer."""
    return 1000 + (token if shape.loop_period is None else token % shape.loop_period)


def render(shape: Shape, asked: Asked) -> list[Write]:
    """Head and body of the answer, in the order of sending."""
    if not shape.is_streamed:
        return [_whole_answer(shape, asked)]
    events = list(_Answer(shape, asked).events())
    body = list(cut_into_writes(shape, events))
    head = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream; charset=utf-8"]
    if shape.framing is Framing.CHUNKED:
        head.append("Transfer-Encoding: chunked")
        if shape.breaks not in _OPEN_ENDS and not shape.stays_open_after_done:
            trailer = b"Server-Timing: total\r\n" if shape.has_chunk_extras else b""
            body.append(Write(body[-1].due_ms, b"0\r\n%s\r\n" % trailer))
    elif shape.framing is Framing.LENGTH:
        head.append(f"Content-Length: {sum(len(write.data) for write in body)}")
    else:
        head.append("Connection: close")
    if shape.content_encoding is not None:
        head.append(f"Content-Encoding: {shape.content_encoding}")
    if shape.has_interim_answer:
        head = ["HTTP/1.1 103 Early Hints", "Link: </style.css>; rel=preload", "", *head]
    return [Write(0.0, ("\r\n".join(head) + "\r\n\r\n").encode()), *body]


def _whole_answer(shape: Shape, asked: Asked) -> Write:
    text = "".join(token_text(shape, j) for j in range(shape.tokens))
    body = json.dumps({"choices": [{"text": text, "finish_reason": "length"}]}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return Write(shape.first_token_ms, head.encode() + body, min(shape.tokens, asked.max_tokens))


class _Answer:
    """Builds the server-sent events of one answer."""

    def __init__(self, shape: Shape, asked: Asked) -> None:
        self._shape = shape
        self._asked = asked
        cap = shape.tokens if shape.ignores_cap else min(shape.tokens, asked.max_tokens)
        self._all_tokens = cap
        self._tokens = cap if shape.break_after is None else min(cap, shape.break_after)
        self._finish = shape.finish_reason
        if self._finish == "length" and cap < asked.max_tokens:
            self._finish = "stop"

    def events(self) -> Iterator[Write]:
        """Every event as unframed bytes."""
        shape = self._shape
        if self._asked.is_chat:
            yield self._event(0.0, self._object(self._choice({"role": "assistant", "content": ""}, "", None)))
        last_ms = shape.first_token_ms
        held = ""
        for index, (at, size, due_ms) in enumerate(shape.events(self._tokens)):
            text = held + "".join(token_text(shape, at + i) for i in range(size))
            is_last = at + size == self._all_tokens
            held = text if shape.holds_text_back and index % 2 == 0 and not is_last else ""
            yield self._event(due_ms, self._tokens_object(at, size, "" if held else text, is_last), size)
            last_ms = due_ms
        if shape.ending_ms:
            last_ms += shape.ending_ms
            yield self._event(last_ms, self._object(self._choice({}, "", self._finish)))
        yield from self._ending(last_ms)

    def _ending(self, due_ms: float) -> Iterator[Write]:
        shape = self._shape
        if shape.breaks is not None:
            yield from self._broken_ending(due_ms)
            return
        usage = self._event(due_ms, self._object(None, self._usage(self._all_tokens)))
        wants_usage = self._asked.wants_usage
        if wants_usage and shape.usage in (UsageAt.END, UsageAt.EVERY, UsageAt.PROMPT_FIRST):
            yield usage
        if shape.says_done:
            yield self._event(due_ms, "[DONE]")
        if wants_usage and shape.usage is UsageAt.AFTER_DONE:
            yield usage

    def _broken_ending(self, due_ms: float) -> Iterator[Write]:
        later_ms = due_ms + self._shape.ms_per_token
        if self._shape.breaks is Break.ERROR_EVENT:
            error: Json = {
                "error": {"message": "the engine ran out of memory", "type": "InternalServerError", "code": 500}
            }
            yield self._event(later_ms, error)
            yield self._event(later_ms, "[DONE]")
        elif self._shape.breaks is Break.HALF_EVENT:
            whole = self._event(later_ms, self._tokens_object(self._tokens, 1, " cut", is_last=False)).data
            yield Write(later_ms, whole[: len(whole) // 2])
        elif self._shape.breaks is Break.NOT_JSON:
            yield self._event(later_ms, "{'text': oops}")
            yield self._event(later_ms, "[DONE]")
        elif self._shape.breaks is Break.PINGS:
            for ping in range(1, PINGS):
                yield Write(due_ms + ping * PING_MS, b": ping\n\n")
        elif self._shape.breaks is Break.EMPTY_EVENTS:
            for ping in range(1, PINGS):
                yield self._event(due_ms + ping * PING_MS, self._object(self._choice({}, "", None)))

        elif self._shape.breaks is Break.DRIP:
            whole = self._event(due_ms, self._tokens_object(self._tokens, 1, " slow", is_last=False)).data
            for byte in range(min(PINGS, whole.index(b'"text"'))):
                yield Write(due_ms + (byte + 1) * PING_MS, whole[byte : byte + 1])

    def _tokens_object(self, at: int, size: int, text: str, is_last: bool) -> Json:
        shape = self._shape
        says_finish = is_last and not shape.ending_ms
        choice = self._choice({shape.text_key: text}, text, self._finish if says_finish else None)
        if self._asked.wants_ids and shape.sends_ids:
            first = 0 if shape.repeats_ids else at
            choice["token_ids"] = [token_id(shape, j) for j in range(first, at + size)]
            if at == 0 and shape.sends_prompt_ids and self._asked.prompt_ids is not None:
                choice["prompt_token_ids"] = list(self._asked.prompt_ids)
        usage = None
        if self._asked.wants_usage:
            if shape.usage is UsageAt.EVERY or (shape.usage is UsageAt.BESIDE and is_last):
                usage = self._usage(at + size)
            elif shape.usage is UsageAt.PROMPT_FIRST and at == 0:
                usage = {"prompt_tokens": self._asked.prompt_tokens}
        return self._object(choice, usage)

    def _choice(self, delta: Json, text: str, finish: str | None) -> Json:
        content: Json = {"delta": delta} if self._asked.is_chat else {"text": text}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish}

    def _object(self, choice: Json | None, usage: Json | None = None) -> Json:
        kind = "chat.completion.chunk" if self._asked.is_chat else "text_completion"
        choices = [] if choice is None else [choice]
        value: Json = {"id": "cmpl-0", "object": kind, "created": 0, "model": "conformance", "choices": choices}
        if self._asked.wants_usage:
            value["usage"] = usage
        if usage is not None and self._shape.cached_tokens is not None:
            self._say_cached(value)
        return value

    def _usage(self, tokens: int) -> Json:
        prompt = self._asked.prompt_tokens + self._shape.prompt_count_off
        completion = tokens + self._shape.completion_count_off
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return usage

    def _say_cached(self, value: Json) -> None:
        """Puts the count of reused tokens where this server says it, in an event that has a usage."""
        *folders, key = self._shape.cached_field
        for name in folders:
            inner = value.setdefault(name, {})
            assert isinstance(inner, dict)
            value = inner
        value[key] = self._shape.cached_tokens

    def _event(self, due_ms: float, value: Json | str, tokens: int = 0) -> Write:
        data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        end = self._shape.line_end
        if self._shape.splits_data:
            data = data.replace(',"object"', f',{end}data: "object"').replace(',"choices"', f',{end}data:"choices"')
        comment = f": keep-alive{end}{end}" if self._shape.comments else ""
        return Write(due_ms, f"{comment}data: {data}{end}{end}".encode(), tokens)
