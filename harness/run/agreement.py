"""Whether two builds said the same: greedy ids of the same requests, and where they first part."""

from collections.abc import Iterable
from dataclasses import dataclass

from .records import StreamRecord, StreamStatus


@dataclass(frozen=True)
class Agreement:
    """requests: answered soundly by both. first_difference: (request id, position in the output), None where equal."""

    baseline: str
    candidate: str
    requests: int
    equal: int
    first_difference: tuple[str, int] | None

    def sentence(self) -> str:
        """For people."""
        pair = f"{self.candidate} and {self.baseline}"
        if self.requests == 0:
            return f"greedy ids of {pair}: no request was answered with ids by both"
        if self.first_difference is None:
            return f"greedy ids of {pair}: equal in all {self.requests} requests"
        request_id, position = self.first_difference
        return (
            f"greedy ids of {pair}: equal in {self.equal} of {self.requests} requests, "
            f"first different in {request_id} at output token {position}"
        )


def id_agreement(streams: Iterable[StreamRecord], baseline: str, candidate: str) -> Agreement:
    """Compares the measured, ok streams that carry ids."""
    answers: dict[str, dict[str, tuple[int, ...]]] = {baseline: {}, candidate: {}}
    for stream in streams:
        if stream.build in answers and stream.status is StreamStatus.OK and not stream.is_warmup and stream.token_ids:
            answers[stream.build][stream.request_id] = stream.token_ids
    common = [request for request in answers[baseline] if request in answers[candidate]]
    differing = [request for request in common if answers[baseline][request] != answers[candidate][request]]
    first = None
    if differing:
        first = (differing[0], _first_difference(answers[baseline][differing[0]], answers[candidate][differing[0]]))
    return Agreement(baseline, candidate, len(common), len(common) - len(differing), first)


def _first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
