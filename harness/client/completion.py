"""One streamed request and what came back of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..run.records import StreamStatus, TokenEvent, Usage
from .timestamps import StampedBy
from .token_counts import CountedBy


@dataclass(frozen=True)
class ChatMessage:
    """One message of a chat request."""

    role: str
    content: str


@dataclass(frozen=True)
class CompletionRequest:
    """One greedy request: prompt ids for /v1/completions, or messages for /v1/chat/completions.

    prompt_tokens is the depth that the server must confirm: by default the number of prompt ids; for messages, the
    length that the chat template makes of them. max_tokens_per_step is for engines
    that are known to send one event a step: num_speculative_tokens + 1.
    """

    prompt_ids: Sequence[int] = ()
    max_tokens: int = 128
    model: str = ""
    ignore_eos: bool = True
    seed: int | None = None
    messages: tuple[ChatMessage, ...] = ()
    prompt_tokens: int | None = None
    max_tokens_per_step: int | None = None
    void_on_repetition: bool = True

    @property
    def depth(self) -> int:
        """Prompt length in tokens."""
        return len(self.prompt_ids) if self.prompt_tokens is None else self.prompt_tokens


@dataclass(frozen=True)
class StreamOutcome:
    """Everything one request brought back. Times are time.perf_counter_ns(); connect_ns is a duration.

    sent_ns is when the request's last byte left, by the clock that stamped the events (stamped_by); refusals are the
    busy answers before it. process_ns is the CPU time this thread spent from there on, reading and parsing; reading_ns
    the part of it while the stream ran. lags_ns: how much later than the kernel this process had each piece of the
    answer, which is no part of any time here.
    """

    sent_ns: int
    connect_ns: int
    ended_ns: int
    wall_utc: str
    events: tuple[TokenEvent, ...]
    events_are_steps: bool
    usage: Usage
    finish_reason: str | None
    status: StreamStatus
    void_reason: str | None = None
    counted_by: CountedBy | None = None
    stamped_by: StampedBy | None = None
    lags_ns: tuple[int, ...] = ()
    http_status: int | None = None
    process_ns: int = 0
    reading_ns: int = 0
    refusals: tuple[str, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every emitted id in order."""
        return tuple(token for event in self.events for token in event.token_ids)

    @property
    def text(self) -> str:
        """The whole streamed text."""
        return "".join(event.text for event in self.events)
