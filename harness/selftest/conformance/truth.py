"""What really happened on the server's side: when each event with tokens was written, by the clock clients use too.

perf_counter_ns is CLOCK_MONOTONIC on Linux, the same for every process of a machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NS_PER_MS = 1e6


@dataclass(frozen=True)
class TruthEvent:
    """One write that completed tokens: due when, handed to the socket when, and how many tokens.

    The bytes left between written_ns and returned_ns, the times just before and after the call (all perf_counter_ns).
    """

    due_ns: int
    written_ns: int
    tokens: int
    returned_ns: int

    @property
    def doubt_ms(self) -> float:
        """How much later than written_ns the bytes may have left: much if the server lost its processor just then."""
        return (self.returned_ns - self.written_ns) / NS_PER_MS


@dataclass(frozen=True)
class Truth:
    """One played stream. received_ns: when the request's last byte was read; prompt_sha256: of its comma-joined ids."""

    case: str
    received_ns: int
    prompt_tokens: int
    prompt_sha256: str
    events: tuple[TruthEvent, ...]

    @property
    def tokens(self) -> int:
        """Tokens that left the server."""
        return sum(event.tokens for event in self.events)

    @property
    def first_written_ns(self) -> int | None:
        """When the first token was written."""
        return self.events[0].written_ns if self.events else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first arrival; None where no token came later than that."""
        if not self.events:
            return None
        first, last = self.events[0], self.events[-1]
        after_first = sum(event.tokens for event in self.events if event.due_ns != first.due_ns)
        return (last.written_ns - first.written_ns) / NS_PER_MS / after_first if after_first else None

    @property
    def step_ms(self) -> float | None:
        """Time per event; None where there are fewer than two."""
        if len(self.events) < 2:
            return None
        return (self.events[-1].written_ns - self.events[0].written_ns) / NS_PER_MS / (len(self.events) - 1)

    def jitter_ms(self) -> list[float]:
        """How late each write was, sorted."""
        return sorted((event.written_ns - event.due_ns) / NS_PER_MS for event in self.events)

    def to_json(self) -> dict[str, object]:
        """For GET /truth and the log."""
        return {
            "case": self.case,
            "received_ns": self.received_ns,
            "prompt_tokens": self.prompt_tokens,
            "prompt_sha256": self.prompt_sha256,
            "tokens": self.tokens,
            "tpot_ms": self.tpot_ms,
            "events": [[event.due_ns, event.written_ns, event.tokens, event.returned_ns] for event in self.events],
        }


def truth_from_json(value: dict[str, object]) -> Truth:
    """The inverse of Truth.to_json. Raises KeyError, TypeError or ValueError on anything else."""
    events = value["events"]
    received_ns, prompt_tokens = value["received_ns"], value["prompt_tokens"]
    if not isinstance(events, list) or not isinstance(received_ns, int) or not isinstance(prompt_tokens, int):
        raise TypeError("not a truth record")
    return Truth(
        case=str(value["case"]),
        received_ns=received_ns,
        prompt_tokens=prompt_tokens,
        prompt_sha256=str(value["prompt_sha256"]),
        events=tuple(TruthEvent(*event) for event in events),
    )


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which `share` of the sorted values lie (nearest rank); None where there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
