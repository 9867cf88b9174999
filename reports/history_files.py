"""The history of a folder as terminal text, Markdown, CSV and JSON."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..harness import format as fmt
from ..harness.client.metrics import tokens_per_second
from .history import Entry, History

FIGURE_HEADERS = ("Build", "Commit", "Context", "ms/token", "tok/s", "ms/step", "tokens/step", "Outputs")
TEXT_COLUMNS = ("Measured", "Run", "Model", "Build", "Commit", "Outputs")  # the others hold numbers
OUTPUT_WORDS = {"passed": "checked", "failed": "wrong", "missing": "not checked"}
NO_SPEED = "no speed"
WIDE = 100  # terminal columns


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
    rule = "".join(" --- |" if header in TEXT_COLUMNS else " ---: |" for header in headers)
    rows = [(_when(each.measured_utc), each.run_id, each.model, *_figures(each)) for each in history.entries]
    lines = ["| " + " | ".join(headers) + " |", "|" + rule]
    lines += ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(history))]).rstrip() + "\n"


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


def _run_table(entries: Sequence[Entry], widths: Sequence[int], shown: Sequence[int]) -> Table:
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for place in shown:
        header = FIGURE_HEADERS[place]
        view.add_column(header, justify="left" if header in TEXT_COLUMNS else "right", min_width=widths[place])
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
