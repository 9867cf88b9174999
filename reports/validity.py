"""Why a cell has no speed, and why two runs have no ratio. One place, so that table, history and page agree."""

from collections.abc import Sequence

from ..harness.environment import require_comparable
from ..harness.errors import ConfigError
from ..harness.run.completeness import how_to_continue
from ..harness.run.records import RunManifest, StreamRecord, StreamStatus
from .saved import CheckState, SavedRun


def why_void(run: SavedRun, build: str, depth: int, *, require_check: bool) -> str | None:
    """The first reason that takes this cell's speed; None where it has one.

    require_check: outputs that nobody checked are a reason (a publication). A failed check always is.
    """
    streams = run.cell_streams(build, depth)
    reasons = void_reasons(streams)
    void = sum(stream.status is StreamStatus.VOID for stream in streams)
    planned = run.manifest.requests_per_depth * len(run.begun_launches)
    expected = planned - run.excluded_streams(build, depth)
    if not streams:
        return "not measured"
    if void > run.manifest.max_void_streams_per_cell:
        return f"{void} of {len(streams)} streams void: {'; '.join(reasons)}"
    if len(streams) < expected:
        return f"{len(streams)} of {expected} streams recorded: {how_to_continue(run.manifest.kind, 'RUN_DIR')}"
    check = run.output_check(build)
    refused = {CheckState.FAILED, CheckState.MISSING} if require_check else {CheckState.FAILED}
    return check.reason if check.state in refused else None


def void_reasons(streams: Sequence[StreamRecord]) -> tuple[str, ...]:
    """Each different reason of the void streams once."""
    void = (stream for stream in streams if stream.status is StreamStatus.VOID)
    return tuple(sorted({stream.void_reason or "no reason recorded" for stream in void}))


def incomparable(first: RunManifest, second: RunManifest) -> str | None:
    """Why the speeds of two runs may not be set against each other; None where they may."""
    try:
        require_comparable(first, second)
    except ConfigError as error:
        return error.message
    return None
