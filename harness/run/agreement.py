"""What was said: whether two builds gave the same greedy ids, where they first part, and all ids of one checkpoint."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import RecordError
from .records import StreamRecord, StreamStatus
from .storage import RunDirectory


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


def outputs_of_model(run_dirs: Sequence[Path], model_sha256: str) -> Iterator[tuple[int, ...]]:
    """The output ids of every good stream of the checkpoint with this hash, whichever builds ran it.

    Raises RecordError for a folder that is no run, or one in which no build ran that checkpoint.
    """
    for path in run_dirs:
        directory = RunDirectory(path)
        builds = {build.name for build in directory.manifest().builds if build.model_sha256 == model_sha256}
        if not builds:
            raise RecordError(
                f"{path}: no build of this run ran this checkpoint (sha256 {model_sha256[:12]})",
                "name runs of this very model, its folder unchanged since; keep other files out of that folder",
            )
        for stream in directory.streams():
            if stream.build in builds and stream.status is StreamStatus.OK:
                yield stream.token_ids


def _first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
