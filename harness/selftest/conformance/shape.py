"""What a case's answer looks like: every knob of a streaming server that has fooled a client somewhere."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class UsageAt(StrEnum):
    """Where the server reports its token counts."""

    END = "in a chunk of its own at the end"
    BESIDE = "beside the last choices"
    EVERY = "in every chunk"
    PROMPT_FIRST = "the prompt's in the first chunk, the rest at the end"
    AFTER_DONE = "after [DONE]"
    NEVER = "never"


class Cut(StrEnum):
    """How events are cut into TCP writes."""

    WHOLE = "one write an event"
    INSIDE_CHUNK = "each event in two writes, cut inside a character and an HTTP chunk"
    INTO_CHUNKS = "each event in two HTTP chunks, cut inside a character"
    SHIFTED = "each write ends one event and begins the next"
    BYTES = "one write a byte"


class Framing(StrEnum):
    """How the HTTP body ends."""

    CHUNKED = "chunked"
    LENGTH = "content-length"
    CLOSE = "connection close"


class Break(StrEnum):
    """How a stream goes wrong in the middle."""

    ERROR_EVENT = "an error event, then [DONE]"
    STALL = "silence"
    PINGS = "comment lines, but no more tokens"
    EMPTY_EVENTS = "events without tokens, and no more tokens"
    DRIP = "the next event byte by byte, and never its end"
    CLOSE = "the connection closes"
    RESET = "the connection is reset"
    HALF_EVENT = "the body ends inside an event"
    NOT_JSON = "an event that is not JSON"


class Words(StrEnum):
    """The text of a token."""

    WORDS = "words"
    SPACES = "single spaces"
    UNICODE = "two-, three- and four-byte characters"
    PROTOCOL = "what looks like the protocol itself"


@dataclass(frozen=True)
class Shape:
    """One streamed answer. Token j exists at first_token_ms + j × ms_per_token; an event goes out with its last one.

    sizes: tokens an event, repeated; first_size: of the first event. With step_ms an event is an engine step: event k
    is due at first_token_ms + k × step_ms, whatever its size. flush_events: so many events are held and sent together.
    """

    tokens: int = 64
    ms_per_token: float = 2.0
    step_ms: float | None = None
    first_token_ms: float = 20.0
    sizes: tuple[int, ...] = (1,)
    first_size: int | None = None
    flush_events: int = 1
    flush_in_one_write: bool = False
    held_back_events: int = 0  # the first so many are held, and sent together with the last of them
    is_chat: bool = False
    text_key: str = "content"  # of a chat delta: content, reasoning, reasoning_content
    words: Words = Words.WORDS
    loop_period: int | None = None  # ids repeat with this period
    sends_ids: bool = True
    holds_text_back: bool = False  # every second event has ids and no text, the next has both texts
    sends_prompt_ids: bool = True
    repeats_ids: bool = False  # every event has all ids so far
    usage: UsageAt = UsageAt.END
    prompt_count_off: int = 0
    completion_count_off: int = 0
    cached_tokens: int | None = None
    cached_field: tuple[str, ...] = ("usage", "prompt_tokens_details", "cached_tokens")  # the path at which it says so
    wrapper_tokens: int = 13  # what the chat template adds
    has_tokenize: bool = True
    finish_reason: str | None = "length"
    ending_ms: float = 0.0  # how long after the last token the finish reason and the usage come, in events of their own
    says_done: bool = True
    stays_open_after_done: bool = False
    line_end: str = "\n"
    comments: bool = False
    splits_data: bool = False  # the JSON of an event over several data lines
    cut: Cut = Cut.WHOLE
    framing: Framing = Framing.CHUNKED
    has_chunk_extras: bool = False  # chunk extensions, and a trailer after the last chunk
    has_interim_answer: bool = False  # 103 Early Hints first
    content_encoding: str | None = None  # as the head says
    is_streamed: bool = True  # false: one JSON answer
    no_delay: bool = True  # TCP_NODELAY at the server
    ignores_cap: bool = False  # sends all its tokens whatever max_tokens says
    break_after: int | None = None  # tokens sent before it breaks
    breaks: Break | None = None

    def events(self, tokens: int) -> Iterator[tuple[int, int, float]]:
        """(first token, number of tokens, ms after the request at which it is due) of every event of an answer."""
        spans = list(self._spans(tokens))
        held = spans[: self.held_back_events]
        spans[: len(held)] = [(at, size, held[-1][2]) for at, size, _ in held]
        for first_of_flush in range(0, len(spans), self.flush_events):
            held = spans[first_of_flush : first_of_flush + self.flush_events]
            for at, size, _ in held:
                yield at, size, held[-1][2]

    def _spans(self, tokens: int) -> Iterator[tuple[int, int, float]]:
        at = index = 0
        while at < tokens:
            size = self.first_size if index == 0 and self.first_size else self.sizes[index % len(self.sizes)]
            size = min(size, tokens - at)
            if self.step_ms is not None:
                due_ms = self.first_token_ms + index * self.step_ms
            else:
                due_ms = self.first_token_ms + (at + size - 1) * self.ms_per_token
            yield at, size, due_ms
            at += size
            index += 1
