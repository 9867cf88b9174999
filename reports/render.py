"""Everything a run publishes, written into one folder from saved records alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import chart, frames, history_chart, movement, table_files
from . import history as histories
from .history import History
from .movement import Revision, revision_since
from .page import render_page
from .saved import SavedRun, load_runs
from .tables import SpeedTable, speed_table

MOVED_FILES = ("moved.md", "moved.json")


@dataclass(frozen=True)
class Publication:
    """Runs read once, their table, and what moved since a former publication where one was named."""

    runs: tuple[SavedRun, ...]
    table: SpeedTable
    revision: Revision | None = None

    @classmethod
    def of(cls, run_dirs: Sequence[Path], *, against: Sequence[Path] = (), require_check: bool = True) -> "Publication":
        """The first run's first build is the baseline. require_check: outputs nobody checked show no speed."""
        runs = load_runs(run_dirs)
        table = speed_table(runs, require_check=require_check)
        if not against:
            return cls(runs, table)
        former = load_runs(against)
        before = former, speed_table(former, require_check=require_check)
        return cls(runs, table, revision_since(before, (runs, table)))

    def write(self, out_dir: Path, *, revision_letter: str | None = None) -> list[Path]:
        """table.{md,csv,json}, speed.{svg,png}, index.html and, against a former publication, moved.{md,json}."""
        letter = revision_letter or ("A" if self.revision is None else "B")
        files = {
            "table.md": table_files.markdown(self.table).encode(),
            "table.csv": table_files.csv_text(self.table).encode(),
            "table.json": frames.json_text(table_files.document(self.table)).encode(),
            "speed.svg": chart.render_svg(self.table),
            "speed.png": chart.render_png(self.table),
            "index.html": render_page(self.runs, self.table, letter=letter, revision=self.revision),
        }
        for name in MOVED_FILES:  # those of an earlier rendering would contradict this one
            (out_dir / name).unlink(missing_ok=True)
        if self.revision is not None:
            files["moved.md"] = movement.markdown(self.revision).encode()
            files["moved.json"] = frames.json_text(movement.document(self.revision)).encode()
        return _write(files, out_dir)


def render_run(run_dirs: Sequence[Path], out_dir: Path, *, require_check: bool = True) -> list[Path]:
    """Writes every file of a publication; returns their paths.

    A bench that has just finished passes require_check=False, and its table says that the check is still to come.
    """
    return Publication.of(run_dirs, require_check=require_check).write(out_dir)


def write_history(history: History, out_dir: Path) -> list[Path]:
    """history.{md,csv,json,svg,png}."""
    files = {
        "history.md": histories.markdown(history).encode(),
        "history.csv": histories.csv_text(history).encode(),
        "history.json": frames.json_text(histories.document(history)).encode(),
        "history.svg": history_chart.render_svg(history),
        "history.png": history_chart.render_png(history),
    }
    return _write(files, out_dir)


def render_table_text(table: SpeedTable, width: int = frames.WIDTH, *, colour: bool = False) -> str:
    """The table for a terminal of `width` columns, plain unless colour is asked for."""
    return frames.terminal_text(
        table_files.terminal_table(table, width), table_files.table_notes(table), width, colour=colour
    )


def render_movement_text(revision: Revision, width: int = frames.WIDTH, *, colour: bool = False) -> str:
    """What moved, for a terminal."""
    return frames.terminal_text(movement.terminal_table(revision), movement.notes(revision), width, colour=colour)


def render_history_text(history: History, width: int = frames.WIDTH, *, colour: bool = False) -> str:
    """The runs of a folder, for a terminal."""
    return frames.terminal_text(histories.terminal_view(history, width), histories.notes(history), width, colour=colour)


def _write(files: Mapping[str, bytes], out_dir: Path) -> list[Path]:
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out_dir / name).write_bytes(content)
    return [out_dir / name for name in files]
