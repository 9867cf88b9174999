"""The runs of a folder in the order they were measured: build, commit, date, depth, ms/token. From records alone."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..harness import format as fmt
from ..harness.client.metrics import median_of, step_ms, tokens_per_second, tokens_per_step, tpot_ms
from ..harness.errors import RecordError
from . import frames
from .frames import Row
from .saved import SavedRun, ok_streams
from .tables import why_void

FIGURE_HEADERS = ("Build", "Commit", "Context", "ms/token", "tok/s", "ms/step", "tokens/step", "Outputs")
WORDS = ("Measured", "Run", "Model", "Build", "Commit", "Outputs")  # the other columns hold numbers
OUTPUT_WORDS = {"passed": "checked", "failed": "wrong", "missing": "not checked"}
NO_SPEED = "no speed"
WIDE = 100  # terminal columns


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


def terminal_view(history: History, width: int) -> RenderableType:
    """Each run's date, name and model as a heading over its own rows; the reasons are in `notes`.

    Steps are left out where the terminal's `width` cannot hold them.
    """
    shown = [place for place, header in enumerate(FIGURE_HEADERS) if width >= WIDE or not header.endswith("/step")]
    figures = [FIGURE_HEADERS, *map(_figures, history.entries)]
    widths = [max(map(len, column)) for column in zip(*figures, strict=True)]
    blocks: list[RenderableType] = []
    for (measured_utc, run_id), group in groupby(history.entries, key=lambda each: (each.measured_utc, each.run_id)):
        entries = list(group)
        models = ", ".join(dict.fromkeys(entry.model for entry in entries))
        blocks.append(Text(f"{_when(measured_utc)}  {run_id}  {models}", style="bold"))
        blocks.append(_run_table(entries, widths, shown))
    return Group(*blocks)


def notes(history: History) -> list[str]:
    """Why entries have no speed, and which folders were skipped."""
    empty: dict[tuple[str, str], list[str]] = {}
    for entry in history.entries:
        if entry.void_reason is not None:
            where = f"{entry.build} at {fmt.count(entry.depth)}"
            empty.setdefault((entry.run_id, entry.void_reason), []).append(where)
    lines = [f"{run_id}: no speed for {', '.join(where)}: {reason}." for (run_id, reason), where in empty.items()]
    return lines + [f"{path}: skipped, {reason}" for path, reason in history.skipped]


def markdown(history: History) -> str:
    """history.md."""
    headers = ("Measured", "Run", "Model", *FIGURE_HEADERS)
    rows = [(_when(each.measured_utc), each.run_id, each.model, *_figures(each)) for each in history.entries]
    return frames.markdown(headers, rows, notes(history), words=WORDS)


def documents(history: History) -> list[Row]:
    """Flat rows with settled numbers."""
    return [
        {name: fmt.settle(value) if isinstance(value, float) else value for name, value in asdict(entry).items()}
        for entry in history.entries
    ]


def csv_text(history: History) -> str:
    """history.csv."""
    rows = documents(history)
    return frames.csv_text(list(rows[0]) if rows else [], rows)


def document(history: History) -> dict[str, object]:
    """history.json."""
    return {"rows": documents(history), "skipped": [list(each) for each in history.skipped]}


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


def _run_table(entries: Sequence[Entry], widths: Sequence[int], shown: Sequence[int]) -> Table:
    view = frames.terminal_table(
        [FIGURE_HEADERS[place] for place in shown], words=WORDS, widths=[widths[place] for place in shown]
    )
    for entry in entries:
        figures = _figures(entry)
        view.add_row(*(Text(figures[place]) for place in shown))
    return view


def _figures(entry: Entry) -> tuple[str, ...]:
    """One entry under FIGURE_HEADERS."""
    return (
        entry.build,
        f"{entry.commit[:9]}{'+' if entry.is_dirty else ''}" if entry.commit else fmt.MISSING,
        fmt.count(entry.depth),
        fmt.milliseconds(entry.tpot_ms),
        fmt.tokens_per_second(None if entry.tpot_ms is None else tokens_per_second(entry.tpot_ms)),
        fmt.milliseconds(entry.step_ms),
        fmt.tokens_per_step(entry.tokens_per_step),
        OUTPUT_WORDS[entry.outputs] if entry.void_reason is None else NO_SPEED,
    )


def _when(utc: str) -> str:
    return utc[:16].replace("T", " ")
