"""What a streamed answer said, read after it ended: from (arrival time, body bytes) to chunks, usage and errors.

Reads the OpenAI completion and chat shapes as vLLM, SGLang and others really send them: usage in a chunk of its own,
beside choices or in every chunk; reasoning under two key names; errors inside a 200 stream; ids in choice or delta.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic_core import from_json

from ..run.records import Usage
from .sse import SseDecoder, SseEvent

Json = dict[str, object]
_FAILED_FINISHES = ("error", "abort")

# How servers say how much of a prompt they did not read: OpenAI, vLLM and SGLang prompt_tokens_details.cached_tokens
# (input_tokens_details in the newer API), DeepSeek prompt_cache_hit_tokens, Moonshot usage.cached_tokens, LiteLLM and
# OpenRouter cache_read_input_tokens, llama.cpp timings.cache_n, SGLang's native API meta_info.cached_tokens.
_CACHED_KEYS = frozenset(("cached_tokens", "prompt_cache_hit_tokens", "cache_read_input_tokens", "cache_n"))
_CACHED_IN_USAGE = ("prompt_tokens_details", "input_tokens_details")
_CACHED_BESIDE_USAGE = ("timings", "meta_info")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event that carried text or tokens. token_ids is None where the server sent no such key.

    running_tokens: completion_tokens of the usage beside it, where there was one.
    """

    t_ns: int
    text: str
    token_ids: tuple[int, ...] | None
    running_tokens: int | None


@dataclass(slots=True)
class Transcript:
    """Everything read from one body. problem is the first thing that makes it unusable, in words, or None."""

    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    prompt_ids: tuple[int, ...] | None = None  # as the server echoes them
    saw_done: bool = False
    problem: str | None = None

    @property
    def usage(self) -> Usage:
        """The server's own counts, the latest of each."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )


def read_transcript(pieces: Iterable[tuple[int, bytes]], *, is_whole: bool = True) -> Transcript:
    """Reads the (perf_counter_ns, body bytes) pieces of one event stream, in order of arrival.

    Of a body that was cut short (is_whole false) the unfinished last event is left out.
    """
    transcript = Transcript()
    decoder = SseDecoder()
    t_ns = 0
    for t_ns, piece in pieces:
        data = decoder.feed_whole(piece)  # what arrives is nearly always one whole event: half the cost of a step
        if data is not None:
            _read_data(transcript, t_ns, data)
            continue
        for event in decoder.feed(piece):
            _read_event(transcript, t_ns, event)
    last = decoder.finish()  # some servers end the body without the last blank line
    if last is not None and is_whole:
        _read_event(transcript, t_ns, last)
    return transcript


def error_message(body: bytes) -> str:
    """The message in an error answer's body, or its first 200 characters."""
    text = body.decode("utf-8", errors="replace")
    try:
        value: object = from_json(text)
    except ValueError:
        return text.strip()[:200]
    return (_error_in(value) if isinstance(value, dict) else None) or text.strip()[:200]


def _read_event(transcript: Transcript, t_ns: int, event: SseEvent) -> None:
    if event.event == "error":
        data = event.data.strip()
        said = error_message(data.encode())
        _note(transcript, f"the server reported an error inside the stream: {said or data[:200]}")
        return
    _read_data(transcript, t_ns, event.data)


def _read_data(transcript: Transcript, t_ns: int, data: str | bytes) -> None:
    data = data.strip()
    if data in ("[DONE]", b"[DONE]"):
        transcript.saw_done = True
        return
    if not data:  # a sign of life, like a comment
        return
    try:
        value: object = from_json(data)  # half the cost of json.loads, and no lone surrogates in the text
    except ValueError:
        if isinstance(data, bytes):  # it may hold bytes that are no character
            _read_data(transcript, t_ns, data.decode("utf-8", errors="replace"))
        else:
            _note(transcript, f"an event that is not JSON: {data[:80]!r}")
        return
    if not isinstance(value, dict):
        _note(transcript, f"an event that is not a JSON object: {_start(data)!r}")
        return
    error = _error_in(value)
    if error is not None:
        _note(transcript, f"the server reported an error inside the stream: {error}")
        return
    try:
        _read_chunk(transcript, t_ns, value)
    except (TypeError, ValueError) as problem:
        _note(transcript, f"an event of an unknown shape ({problem}): {_start(data)!r}")


def _start(data: str | bytes) -> str:
    return data[:80] if isinstance(data, str) else data[:80].decode("utf-8", errors="replace")


def _read_chunk(transcript: Transcript, t_ns: int, value: Json) -> None:
    running = _read_usage(transcript, value.get("usage"))
    for name in _CACHED_BESIDE_USAGE:
        if name in value:
            _read_cached(transcript, value[name], name)
    choices = _list(value.get("choices") or [], "choices")
    if not choices:
        return
    if len(choices) > 1:
        raise ValueError(f"{len(choices)} choices where one was asked for")
    choice = _object(choices[0], "choice")
    delta = _object(choice.get("delta") or {}, "delta")
    echoed = choice.get("prompt_token_ids") or value.get("prompt_token_ids")
    if echoed is not None and transcript.prompt_ids is None:
        transcript.prompt_ids = _ids(echoed)
    raw_ids = choice["token_ids"] if "token_ids" in choice else delta.get("token_ids")
    token_ids = None if raw_ids is None else _ids(raw_ids)
    text = _text_of(choice, delta)
    if text or token_ids or (running is not None):
        transcript.chunks.append(Chunk(t_ns, text, token_ids, running))
    finish = choice.get("finish_reason")
    if finish is not None:
        transcript.finish_reason = str(finish)
        if finish in _FAILED_FINISHES:
            _note(transcript, f"the server ended the stream with finish_reason {finish!r}")


def _text_of(choice: Json, delta: Json) -> str:
    text = choice.get("text")
    if isinstance(text, str):
        return text
    reasoning = delta.get("reasoning") or delta.get("reasoning_content")  # two names for one thing; some send both
    parts = [part for part in (reasoning, delta.get("content")) if isinstance(part, str)]
    for call in _list(delta.get("tool_calls") or [], "tool_calls"):
        function = _object(_object(call, "tool call").get("function") or {}, "function")
        parts += [part for part in (function.get("name"), function.get("arguments")) if isinstance(part, str)]
    return "".join(parts)


def _read_usage(transcript: Transcript, raw: object) -> int | None:
    """Keeps the latest counts; returns completion_tokens of this usage."""
    if raw is None:
        return None
    usage = _object(raw, "usage")
    completion = _count(usage.get("completion_tokens"))
    prompt = _count(usage.get("prompt_tokens"))
    if prompt is not None:
        transcript.prompt_tokens = prompt
    if completion is not None:
        transcript.completion_tokens = completion
    _read_cached(transcript, usage, "usage")
    for name in _CACHED_IN_USAGE:
        if name in usage:
            _read_cached(transcript, usage[name], name)
    return completion


def _read_cached(transcript: Transcript, raw: object, name: str) -> None:
    """Keeps the largest count of reused prompt tokens, under whichever of its names the server sends it."""
    if raw is None:
        return
    counts = _object(raw, name)
    for key in _CACHED_KEYS.intersection(counts):
        cached = _count(counts[key])
        if cached is not None:
            transcript.cached_tokens = max(cached, transcript.cached_tokens or 0)


def _error_in(value: Json) -> str | None:
    error = value.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)
    if error:
        return str(error)
    if value.get("object") == "error" or "detail" in value:
        return str(value.get("message") or value.get("detail"))
    return None


def _note(transcript: Transcript, problem: str) -> None:
    if transcript.problem is None:
        transcript.problem = problem


def _object(value: object, name: str) -> Json:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is not an object")
    return value


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is not a list")
    return value


def _ids(value: object) -> tuple[int, ...]:
    ids = tuple(_list(value, "token_ids"))
    if not all(type(token) is int and token >= 0 for token in ids):
        raise TypeError("token_ids holds something that is not an id")
    return ids  # type: ignore[return-value]  # checked above, once a token instead of twice


def _count(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise TypeError(f"a count that is {value!r}")
    return value
