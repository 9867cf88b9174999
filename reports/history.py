"""The runs of a folder in the order they were measured: build, commit, date, depth, ms/token. From records alone."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from ..harness.errors import RecordError
from ..harness.metrics import median_of, step_ms, tokens_per_second, tokens_per_step, tpot_ms
from . import format as fmt
from .saved import SavedRun, ok_streams
from .validity import why_void

HEADERS = ("Measured", "Run", "Build", "Commit", "Context", "ms/token", "tok/s", "ms/step", "tokens/step", "Outputs")


@dataclass(frozen=True)
class Entry:
    """One build at one depth in one run; speeds are None where void_reason says why."""

    measured_utc: str
    run_id: str
    build: str
    commit: str | None
    is_dirty: bool
    depth: int
    tpot_ms: float | None
    step_ms: float | None
    tokens_per_step: float | None
    outputs: str  # passed, failed or missing: the output check
    void_reason: str | None


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
    def builds(self) -> tuple[str, ...]:
        """Each build once, in order of appearance."""
        return tuple(dict.fromkeys(entry.build for entry in self.entries))

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


def terminal_table(history: History) -> Table:
    """For a rich console; a run's own words once."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for place, header in enumerate(HEADERS):
        view.add_column(header, justify="right" if place in range(4, 9) else "left")
    previous: tuple[str, ...] = ()
    for row in _text_rows(history):
        if previous and row[1] != previous[1]:
            view.add_section()
        repeats = 2 if previous and row[1] == previous[1] else 0
        view.add_row(*(Text("" if place < repeats else text) for place, text in enumerate(row)))
        previous = row
    return view


def markdown(history: History) -> str:
    """history.md."""
    lines = ["| " + " | ".join(HEADERS) + " |", "|" + " --- |" * 4 + " ---: |" * 5 + " --- |"]
    lines += ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in _text_rows(history)]
    lines += ["", *(f"- {path}: skipped, {reason}" for path, reason in history.skipped)] if history.skipped else []
    return "\n".join(lines) + "\n"


def documents(history: History) -> list[dict[str, str | int | float | bool | None]]:
    """Flat rows with settled numbers."""
    return [
        {name: fmt.settle(value) if isinstance(value, float) else value for name, value in asdict(entry).items()}
        for entry in history.entries
    ]


def csv_text(history: History) -> str:
    """history.csv."""
    stream = io.StringIO()
    rows = documents(history)
    writer = csv.DictWriter(stream, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def json_text(history: History) -> str:
    """history.json."""
    document = {"rows": documents(history), "skipped": [list(each) for each in history.skipped]}
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


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
                commit=build.git_commit,
                is_dirty=bool(build.git_dirty),
                depth=depth,
                tpot_ms=median_of([tpot_ms(stream) for stream in streams]),
                step_ms=median_of([step_ms(stream) for stream in streams]),
                tokens_per_step=median_of([tokens_per_step(stream) for stream in streams]),
                outputs=str(run.output_check(build.name).state),
                void_reason=reason,
            )


def _text_rows(history: History) -> Iterator[tuple[str, ...]]:
    for entry in history.entries:
        speed = None if entry.tpot_ms is None else tokens_per_second(entry.tpot_ms)
        yield (
            entry.measured_utc[:16].replace("T", " "),
            entry.run_id,
            entry.build,
            f"{entry.commit[:9]}{'+' if entry.is_dirty else ''}" if entry.commit else fmt.MISSING,
            fmt.count(entry.depth),
            fmt.milliseconds(entry.tpot_ms),
            fmt.tokens_per_second(speed),
            fmt.milliseconds(entry.step_ms),
            fmt.tokens_per_step(entry.tokens_per_step),
            OUTPUT_WORDS[entry.outputs] if entry.void_reason is None else f"void: {entry.void_reason}",
        )


OUTPUT_WORDS = {"passed": "checked", "failed": "wrong", "missing": "not checked"}
