"""Whether one stream may be used: every way in which a server's answer can be wrong, in words."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ..config.models import LimitsConfig
from ..run.records import TokenEvent
from .completion import CompletionRequest
from .metrics import NS_PER_MS, comes_in_a_burst
from .repetition import find_repetition_loop
from .response_reader import NS_PER_S
from .token_counts import CountedBy, TextTokenizer, TokenCounts, text_problem
from .transcript import Transcript

MAX_WAIT_SHARE = 0.02  # of a stream that the process itself stamped; its time per token may be off by as much
MAX_WAIT_NS = 1_000_000  # that much never matters
MIN_EVENT_GAP_US = 50.0  # less on the average is no decoding, but the release of what was held
MIN_HELD_BACK_EVENTS = 4
MAX_BURST_SHARE = 1 / 3  # of the gaps: a late reader makes a few, a server that flushes makes most


def problems(
    request: CompletionRequest,
    transcript: Transcript,
    counts: TokenCounts,
    limits: LimitsConfig,
    tokenizer: TextTokenizer | None,
) -> Iterator[str]:
    """Every reason to void the stream, the most telling first."""
    if transcript.problem:
        yield transcript.problem
    if counts.problem:
        yield counts.problem
    yield from _count_problems(request, transcript, counts)
    yield from _depth_problems(request, transcript)
    yield from _stalls(counts.events, limits)
    yield from _held_back(counts.events)
    if counts.counted_by in (CountedBy.IDS, CountedBy.TOKENIZER):
        yield from _content_problems(request, counts.events, tokenizer)


def events_are_steps(events: Sequence[TokenEvent], max_tokens_per_step: int | None) -> bool:
    """Whether one event is one engine step, as far as a client can know.

    Of an engine that is known to send one event a step, unless an event holds more tokens than a step can make. Of any
    other, if every event holds one token and they do not come in bursts, as from a server that flushes every n tokens,
    nor begin with one, as behind a proxy that holds the first bytes back.
    """
    limit = 1 if max_tokens_per_step is None else max_tokens_per_step
    if any(event.num_tokens > limit for event in events):
        return False
    if max_tokens_per_step is not None or len(events) < 3:
        return True
    in_burst = comes_in_a_burst(events)
    return not in_burst[0] and sum(in_burst) <= MAX_BURST_SHARE * (len(events) - 1)


def lateness_problem(events: Sequence[TokenEvent], waited_ns: int) -> str | None:
    """Why the times of a stream that this process stamped itself cannot be told; None where they can.

    waited_ns: how long this process was ready to read without a processor, which bounds how late its stamps are in all.
    """
    decode_ns = events[-1].t_ns - events[0].t_ns if events else 0
    if waited_ns <= max(MAX_WAIT_NS, MAX_WAIT_SHARE * decode_ns):
        return None
    return (
        f"this process waited {waited_ns / NS_PER_MS:.1f} ms for a processor in {decode_ns / NS_PER_MS:.1f} ms of "
        "tokens, and the kernel does not stamp what arrives on this connection: when they came cannot be told"
    )


def _count_problems(request: CompletionRequest, transcript: Transcript, counts: TokenCounts) -> Iterator[str]:
    total = sum(event.num_tokens for event in counts.events)
    counted = transcript.usage.completion_tokens
    if transcript.finish_reason is None and total != request.max_tokens:
        yield f"the stream ended without a finish reason after {total} of {request.max_tokens} tokens"
    if counted is not None and counts.events and counted != total:
        yield f"usage says {counted} tokens, {total} came by {counts.counted_by}"
    if total > request.max_tokens:
        yield f"{total} tokens came where {request.max_tokens} were asked for"


def _depth_problems(request: CompletionRequest, transcript: Transcript) -> Iterator[str]:
    usage, echoed = transcript.usage, transcript.prompt_ids
    if usage.prompt_tokens is not None and usage.prompt_tokens != request.depth:
        yield f"the server counted {usage.prompt_tokens} prompt tokens where {request.depth} were sent"
    elif echoed is not None and request.prompt_ids and echoed != tuple(request.prompt_ids):
        yield f"the server read other prompt ids than were sent ({len(echoed)} of them)"
    elif usage.prompt_tokens is None and echoed is None:
        yield "the server confirms no prompt length: neither usage nor prompt ids"
    if usage.cached_tokens:
        yield f"the server reused {usage.cached_tokens} cached prompt tokens"


def _content_problems(
    request: CompletionRequest, events: Sequence[TokenEvent], tokenizer: TextTokenizer | None
) -> Iterator[str]:
    disagreement = None if tokenizer is None else text_problem(events, tokenizer)
    if disagreement:
        yield disagreement
    loop = find_repetition_loop([token for event in events for token in event.token_ids])
    if loop and request.void_on_repetition:
        yield f"degenerate output: {loop.length} tokens from {loop.start} on repeat with period {loop.period}"


def _held_back(events: Sequence[TokenEvent]) -> Iterator[str]:
    if len(events) < MIN_HELD_BACK_EVENTS:
        return
    gap_us = (events[-1].t_ns - events[0].t_ns) / (len(events) - 1) / 1000
    if gap_us < MIN_EVENT_GAP_US:
        yield (
            f"the stream was held back: its {len(events)} events came {gap_us:.1f} µs apart, sooner than any server "
            "sends them one by one; something between buffers them"
        )


def _stalls(events: Sequence[TokenEvent], limits: LimitsConfig) -> Iterator[str]:
    limit_ns = limits.stall_s * NS_PER_S
    for earlier, later in pairwise(events):
        if later.t_ns - earlier.t_ns > limit_ns:
            gap_s = (later.t_ns - earlier.t_ns) / NS_PER_S
            yield f"stalled: {gap_s:.3g} s between tokens, the limit is {limits.stall_s:g} s"
            return
