"""What one checkpoint said in recorded runs, whichever builds ran it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import RecordError
from .records import StreamStatus
from .storage import RunDirectory


def outputs_of_model(run_dirs: Sequence[Path], model_sha256: str) -> Iterator[tuple[int, ...]]:
    """The output ids of every good stream of the checkpoint with this hash.

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
