"""How far a run got: launches begun and completed, what it still lacks, and whether it ended as it should."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .records import RunManifest, StreamRecord
from .storage import Request, RunDirectory


def begun_launches(
    manifest: RunManifest, streams: Iterable[StreamRecord], requests: Iterable[Request] = ()
) -> frozenset[int]:
    """The launches that count as planned: all of a bench's; of a gate, which may stop early, those that left a trace.

    A launch that was killed has no LaunchRecord: its prompts were written down before an engine started, its streams
    as they finished.
    """
    if manifest.kind == "bench":
        return frozenset(range(manifest.launches))
    recorded = {record.launch for record in manifest.launch_records}
    return frozenset(recorded.union((stream.launch for stream in streams), (request.launch for request in requests)))


def missing_streams(
    manifest: RunManifest, streams: Iterable[StreamRecord], builds: Sequence[str], launches: frozenset[int]
) -> dict[str, int]:
    """Streams of these launches that are not recorded, of the builds that lack some; warm-ups do not count."""
    recorded = Counter(stream.build for stream in streams if not stream.is_warmup and stream.launch in launches)
    planned = _streams_a_launch(manifest) * len(launches)
    return {build: planned - recorded[build] for build in builds if recorded[build] < planned}


def complete_launches(manifest: RunManifest, streams: Iterable[StreamRecord]) -> int:
    """How many launches have every measured stream of every build."""
    recorded = Counter((stream.launch, stream.build) for stream in streams if not stream.is_warmup)
    wanted, builds = _streams_a_launch(manifest), [build.name for build in manifest.builds]
    launches = {launch for launch, _ in recorded}
    return sum(all(recorded[launch, build] >= wanted for build in builds) for launch in launches)


def why_unfinished(directory: RunDirectory, manifest: RunManifest) -> str | None:
    """In words, where the run did not come to its end; None where it did."""
    if directory.was_killed():
        return "the process that measured it was killed, or measures still (its run.lock is there)"
    return "it did not come to its end" if manifest.finished_utc is None else None


def how_to_continue(kind: str, run_dir: Path | str) -> str:
    """What to do about a run that lacks streams."""
    if kind == "calibrate":
        return "measure it again with `kernarc-gate calibrate`: an A/A is not resumed"
    return f"continue with `kernarc-gate {kind} --resume {run_dir}`"


def _streams_a_launch(manifest: RunManifest) -> int:
    return len(manifest.depths) * manifest.requests_per_depth
