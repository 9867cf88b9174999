"""A finished run as reports read it: manifest, measured streams in a fixed order, what the gate left beside them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from ..harness.errors import RecordError
from ..harness.records import RunManifest, StreamRecord, StreamStatus
from ..harness.storage import RunDirectory


class CheckState(StrEnum):
    """What the output check said about the streams of one cell."""

    PASSED = "passed"
    FAILED = "failed"
    MISSING = "missing"


@dataclass(frozen=True)
class CellCheck:
    """The output check of one build at one depth, with the reason where it did not pass."""

    state: CheckState
    reason: str | None = None


NOT_CHECKED = CellCheck(CheckState.MISSING, "outputs not checked: run `kernarc-gate check RUN_DIR`")


@dataclass(frozen=True)
class SavedRun:
    """One run directory, read once. streams: the measured ones, sorted, so that record order reaches no rendering."""

    path: Path
    manifest: RunManifest
    streams: tuple[StreamRecord, ...]

    @classmethod
    def load(cls, path: Path) -> "SavedRun":
        """Reads manifest and streams; RecordError where they are not records."""
        directory = RunDirectory(path)
        measured = (stream for stream in directory.streams() if not stream.is_warmup)
        return cls(path, directory.manifest(), tuple(sorted(measured, key=_fixed_order)))

    def cell_streams(self, build: str, depth: int) -> tuple[StreamRecord, ...]:
        """The measured streams of one build at one depth, void ones included."""
        return self._by_cell.get((build, depth), ())

    def cell_check(self, build: str, depth: int) -> CellCheck:
        """What check.json says of this cell; missing where there is none."""
        return self._checks.get((build, depth), NOT_CHECKED)

    @cached_property
    def _by_cell(self) -> dict[tuple[str, int], tuple[StreamRecord, ...]]:
        cells: dict[tuple[str, int], list[StreamRecord]] = {}
        for stream in self.streams:
            cells.setdefault((stream.build, stream.depth), []).append(stream)
        return {cell: tuple(streams) for cell, streams in cells.items()}

    @cached_property
    def _checks(self) -> dict[tuple[str, int], CellCheck]:
        document = read_document(self.path / "check.json")
        cells = document.get("cells", []) if document else []
        if not isinstance(cells, list):
            raise RecordError(f"{self.path / 'check.json'}: cells is not a list", "run `kernarc-gate check` again")
        return dict(_cell_check(cell) for cell in cells)

    @cached_property
    def verdict(self) -> dict[str, object] | None:
        """verdict.json of a comparison, None for a run without one."""
        return read_document(self.path / "verdict.json")


def load_runs(paths: Iterable[Path]) -> tuple[SavedRun, ...]:
    """Every run directory in the order given: the first run's first build is the baseline."""
    return tuple(SavedRun.load(Path(path)) for path in paths)


def ok_streams(streams: Iterable[StreamRecord]) -> tuple[StreamRecord, ...]:
    """The streams that count."""
    return tuple(stream for stream in streams if stream.status is StreamStatus.OK)


def read_document(path: Path) -> dict[str, object] | None:
    """A JSON object beside the records, None where the file is absent."""
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read as JSON: {error}", "run the command that wrote it again") from error
    if not isinstance(document, dict):
        raise RecordError(f"{path} holds no JSON object", "run the command that wrote it again")
    return document


def _cell_check(cell: dict[str, object]) -> tuple[tuple[str, int], CellCheck]:
    key = (str(cell["build"]), int(str(cell["depth"])))
    if cell.get("verdict") == "PASS":
        return key, CellCheck(CheckState.PASSED)
    return key, CellCheck(CheckState.FAILED, f"output check: {cell.get('reason') or cell.get('verdict')}")


def _fixed_order(stream: StreamRecord) -> tuple[int, str, int, int, str]:
    return (stream.depth, stream.build, stream.launch, stream.slot, stream.request_id)
