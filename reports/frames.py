"""The one writer of tables: Markdown, CSV, JSON text and terminal text, whatever the table is about."""

import csv
import io
import json
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from ..harness import format as fmt

WIDTH = 120  # columns of a terminal text that goes to no terminal
Value = str | int | float | bool | None
Row = dict[str, Value]


def markdown(
    headers: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str], *, words: Collection[str]
) -> str:
    """A GitHub table with its notes below; the columns named in `words` stand left, numbers right."""
    lines = ["| " + " | ".join(headers) + " |"]
    lines += ["|" + "|".join(" --- " if header in words else " ---: " for header in headers) + "|"]
    lines += ["| " + " | ".join(_escape(text) for text in row) + " |" for row in rows]
    if notes:
        lines += ["", *(f"- {_escape(note)}" for note in notes)]
    return "\n".join(lines) + "\n"


def csv_text(fields: Sequence[str], rows: Iterable[Mapping[str, Value]]) -> str:
    """Tidy CSV; empty where there is no value."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def json_text(document: Mapping[str, object]) -> str:
    """The same document gives the same bytes."""
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def settled(value: float | None) -> float | None:
    """A number as CSV and JSON carry it."""
    return None if value is None else fmt.settle(value)


def terminal_table(headers: Sequence[str], *, words: Collection[str], widths: Sequence[int | None] = ()) -> Table:
    """An empty table for a rich console; widths: the least of each column."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for header, width in zip(headers, widths or [None] * len(headers), strict=True):
        view.add_column(header, justify="left" if header in words else "right", min_width=width)
    return view


def terminal_text(view: RenderableType, notes: Sequence[str], width: int, *, colour: bool) -> str:
    """A table and its notes for a terminal of `width` columns, plain unless colour is asked for."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None)
    console.print(view)
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False)
    return stream.getvalue()


def screen() -> tuple[int, bool]:
    """Columns of standard output and whether it takes colour; what is no terminal has the same width everywhere."""
    if not sys.stdout.isatty():
        return WIDTH, False
    return shutil.get_terminal_size((WIDTH, 40)).columns, True


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
