"""One formula a metric. Times in, milliseconds out; None where the stream does not define the metric.

A stream is events (t_i, n_i tokens), i = 0…E−1, N = Σ n_i. Source of the definitions: the project's design page,
after the faults of public serving benchmarks (chunks counted as tokens, prefill inside TPOT, first chunk of k tokens).
"""

from collections.abc import Sequence
from itertools import pairwise, takewhile
from statistics import median
from typing import Protocol

from ..run.records import TokenEvent

NS_PER_MS = 1e6
BURST_GAP = 0.1


class TimedStream(Protocol):
    """What the metrics need of a stream; StreamRecord and StreamOutcome both are one."""

    @property
    def sent_ns(self) -> int: ...
    @property
    def events(self) -> tuple[TokenEvent, ...]: ...
    @property
    def events_are_steps(self) -> bool: ...


def ttft_ms(stream: TimedStream) -> float | None:
    """Time to first token: t_0 − sent."""
    if not stream.events:
        return None
    return (stream.events[0].t_ns - stream.sent_ns) / NS_PER_MS


def tpot_ms(stream: TimedStream) -> float | None:
    """Time per output token: (t_last − t_0) / (N − n_0). Unchanged by how the server groups tokens into events.

    n_0 is the tokens of the first event and of those with the very same stamp; where events are no steps, of the first
    burst: a server that flushes every n tokens as n events sends them all at the time of the last.
    """
    tokens_after_first = _tokens_after_first(stream)
    if tokens_after_first < 1:
        return None
    return _decode_ms(stream) / tokens_after_first


def step_ms(stream: TimedStream) -> float | None:
    """Time per engine step: (t_last − t_0) / (E − e_0), e_0 the events that came with the first, mostly 1.

    None where an event is not known to be a step.
    """
    steps = _steps_after_first(stream)
    return _decode_ms(stream) / steps if steps else None


def tokens_per_step(stream: TimedStream) -> float | None:
    """Mean tokens an engine step: (N − n_0) / (E − e_0), so tpot_ms = step_ms / tokens_per_step."""
    steps = _steps_after_first(stream)
    return _tokens_after_first(stream) / steps if steps else None


def tokens_per_second(tpot: float) -> float:
    """Decode speed of one stream: 1000 / TPOT in ms."""
    return 1000.0 / tpot


def median_of(values: Sequence[float | None]) -> float | None:
    """Median of the defined values; None where there is none."""
    defined = [value for value in values if value is not None]
    return median(defined) if defined else None


def comes_in_a_burst(events: Sequence[TokenEvent]) -> list[bool]:
    """For every event after the first, whether it was sent together with the one before.

    It was, if it came in less than a tenth of the time that its tokens take at the stream's mean time per token.
    """
    after_first = sum(event.num_tokens for event in events[1:])
    if not after_first:
        return []
    close_ns = BURST_GAP * (events[-1].t_ns - events[0].t_ns) / after_first  # a token
    return [later.t_ns - earlier.t_ns <= close_ns * later.num_tokens for earlier, later in pairwise(events)]


def _decode_ms(stream: TimedStream) -> float:
    return (stream.events[-1].t_ns - stream.events[0].t_ns) / NS_PER_MS


def _steps_after_first(stream: TimedStream) -> int:
    """Steps between the first arrival and the last; 0 where events are not known to be steps."""
    return len(stream.events) - _first_group_length(stream) if stream.events_are_steps else 0


def _tokens_after_first(stream: TimedStream) -> int:
    return sum(event.num_tokens for event in stream.events[_first_group_length(stream) :])


def _first_group_length(stream: TimedStream) -> int:
    """How many events make the first arrival: those of one stamp, or a whole burst where events are no steps.

    Steps never end at the same nanosecond: events of one stamp are some that had come before they could be told apart.
    """
    if stream.events_are_steps:
        first_ns = stream.events[0].t_ns if stream.events else 0
        return sum(1 for _ in takewhile(lambda event: event.t_ns == first_ns, stream.events))
    in_burst = comes_in_a_burst(stream.events)
    return in_burst.index(False) + 1 if False in in_burst else len(stream.events)
