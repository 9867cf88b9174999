"""Everything a run publishes, written into one folder from saved records alone."""

import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from . import chart, table_files
from .page import render_page
from .saved import load_runs
from .tables import SpeedTable, speed_table


def render_run(
    run_dirs: Sequence[Path], out_dir: Path, *, require_check: bool = True, revision: str = "A"
) -> list[Path]:
    """Writes table.md, table.csv, table.json, speed.svg, speed.png and index.html; returns their paths.

    The first run's first build is the baseline. require_check: a cell whose outputs nobody checked shows no speed; a
    bench that has just finished passes False and its table says that the check is still to come.
    """
    runs = load_runs(run_dirs)
    table = speed_table(runs, require_check=require_check)
    files = {
        "table.md": table_files.markdown(table).encode(),
        "table.csv": table_files.csv_text(table).encode(),
        "table.json": table_files.json_text(table).encode(),
        "speed.svg": chart.render_svg(table),
        "speed.png": chart.render_png(table),
        "index.html": render_page(runs, table, revision=revision),
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in files.items():
        path = out_dir / name
        path.write_bytes(content)
        paths.append(path)
    return paths


def render_table_text(table: SpeedTable, width: int = 120, *, colour: bool = False) -> str:
    """The table for a terminal of `width` columns, plain unless colour is asked for."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None)
    console.print(table_files.terminal_table(table, width))
    for note in table_files.table_notes(table):
        console.print(note, style="dim", markup=False, highlight=False)
    return stream.getvalue()
