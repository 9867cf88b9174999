"""The runs of a folder in the order they were measured: build, commit, date, depth, ms/token. From records alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..harness import format as fmt
from ..harness.client.metrics import median_of, step_ms, tokens_per_step, tpot_ms
from ..harness.errors import RecordError
from .saved import SavedRun, ok_streams
from .validity import why_void


@dataclass(frozen=True)
class Entry:
    """One build at one depth in one run; speeds are None where void_reason says why."""

    measured_utc: str
    run_id: str
    build: str
    model: str
    machine: str  # the GPU, or the CPU where there is none
    commit: str | None
    is_dirty: bool
    depth: int
    tpot_ms: float | None
    step_ms: float | None
    tokens_per_step: float | None
    outputs: str  # passed, failed or missing: the output check
    void_reason: str | None

    @property
    def series(self) -> tuple[str, str, str]:
        """What must be equal for two entries to be points of one line."""
        return self.build, self.model, self.machine


@dataclass(frozen=True)
class History:
    """Every entry, oldest run first, and the folders that could not be read, with the reason."""

    entries: tuple[Entry, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def depths(self) -> tuple[int, ...]:
        """Each depth once."""
        return tuple(sorted({entry.depth for entry in self.entries}))

    @property
    def series(self) -> dict[tuple[str, str, str], str]:
        """Each line of the chart in order of appearance, named by its build and by whatever else varies."""
        keys = list(dict.fromkeys(entry.series for entry in self.entries))
        varies = [True, *(len({key[place] for key in keys}) > 1 for place in (1, 2))]
        return {key: ", ".join(part for part, shown in zip(key, varies, strict=True) if shown) for key in keys}

    @property
    def runs(self) -> tuple[tuple[str, str], ...]:
        """(measured_utc, run_id) of each run, oldest first."""
        return tuple(dict.fromkeys((entry.measured_utc, entry.run_id) for entry in self.entries))


def read_history(folder: Path) -> History:
    """Every run directory at or below the folder; RecordError where there is none."""
    if not folder.is_dir():
        raise RecordError(f"{folder} is not a folder", "name the folder that holds run directories, such as runs/")
    entries: list[Entry] = []
    skipped: list[tuple[str, str]] = []
    for manifest in sorted(folder.rglob("manifest.json")):
        try:
            entries += _entries(SavedRun.load(manifest.parent))
        except RecordError as error:
            skipped.append((str(manifest.parent.relative_to(folder)), error.message))
    if not entries and not skipped:
        raise RecordError(f"there is no run directory in {folder}", "`kernarc-gate bench` writes its runs to runs/")
    ordered = sorted(entries, key=lambda each: (each.measured_utc, each.run_id))
    return History(tuple(ordered), tuple(skipped))


def _entries(run: SavedRun) -> Iterator[Entry]:
    manifest = run.manifest
    for build in manifest.builds:
        for depth in manifest.depths:
            reason = why_void(run, build.name, depth, require_check=False)
            streams = ok_streams(run.cell_streams(build.name, depth)) if reason is None else ()
            yield Entry(
                measured_utc=manifest.created_utc,
                run_id=manifest.run_id,
                build=build.name,
                model=fmt.model_name(build.model),
                machine=manifest.environment.gpu_name or manifest.environment.cpu_model,
                commit=build.git_commit,
                is_dirty=bool(build.git_dirty),
                depth=depth,
                tpot_ms=median_of([tpot_ms(stream) for stream in streams]),
                step_ms=median_of([step_ms(stream) for stream in streams]),
                tokens_per_step=median_of([tokens_per_step(stream) for stream in streams]),
                outputs=str(run.output_check(build.name).state),
                void_reason=reason,
            )
