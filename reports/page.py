"""index.html: the sheet as one file that asks nobody for anything. Data and layout meet here; rounding does not."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from ..harness import format as fmt
from ..harness.client.metrics import tpot_ms
from . import movement
from .decode_step import section
from .movement import Revision
from .notes import footnotes, general_notes
from .page_chart import MEDIUM, NARROW, WIDE, describe_chart, view
from .replay import Lane, race_json, races
from .saved import SavedRun
from .speed_ups import SpeedUp
from .table_files import interval_text
from .tables import Column, SpeedTable
from .titleblock import title_block

TEMPLATES = ("page.html", "view.html", "race.html", "section.html", "tables.html", "page.css", "page.js")


@dataclass(frozen=True)
class TableCell:
    """One build at one depth as printed in Table 1 and Table 2; reason where there is no speed."""

    column: Column
    series: int
    tpot_ms: str
    interval: str
    tokens_per_second: str
    step_ms: str
    tokens_per_step: str
    ttft_ms: str
    reason: str | None


@dataclass(frozen=True)
class TableRow:
    """One depth: its cells and a (ratio, interval) for every candidate."""

    label: str
    cells: tuple[TableCell, ...]
    speed_ups: tuple[tuple[str, str], ...]


def render_page(
    runs: Sequence[SavedRun], table: SpeedTable, *, letter: str = "A", revision: Revision | None = None
) -> bytes:
    """The whole page, UTF-8. letter: of the title block; revision: what moved since a former publication."""
    environment = _environment()
    found = races(runs, table)
    script = _source("page.js")
    text = environment.get_template("page.html").render(
        table=table,
        block=title_block(runs, table, letter),
        views=tuple(view(table, paper) for paper in (WIDE, MEDIUM, NARROW)),
        description=describe_chart(table),
        races=found,
        start=found[-1] if found else None,
        race_data=Markup(race_json(found)),
        section=section(runs, table),
        rows=_rows(table),
        means=_mean_row(table),
        footnotes=footnotes(table),
        notes=general_notes(runs, table),
        revision=revision,
        moved=() if revision is None else movement.rows(revision),
        moved_headers=movement.HEADERS,
        moved_notes=() if revision is None else movement.notes(revision),
        style=Markup(_source("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return text.encode()


def _environment() -> Environment:
    sources = {name: _source(name) for name in TEMPLATES if name.endswith(".html")}
    environment = Environment(
        loader=DictLoader(sources), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "count": fmt.count,
        "seconds": fmt.seconds,
        "xy": lambda value: f"{value:.1f}",
        "lane_speed": _lane_speed,
    }
    return environment


def _source(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


def _lane_speed(lane: Lane) -> str:
    """A lane's own ms/token, as its header says it."""
    return "no speed" if lane.stream is None else f"{fmt.milliseconds(tpot_ms(lane.stream))} ms/token"


def _rows(table: SpeedTable) -> tuple[TableRow, ...]:
    rows = []
    for depth in table.depths:
        cells = tuple(_cell(table, series, column, depth) for series, column in enumerate(table.columns))
        ups = tuple(_speed_up(table.speed_ups[column.key, depth]) for column in table.candidates)
        rows.append(TableRow(fmt.count(depth), cells, ups))
    return tuple(rows)


def _mean_row(table: SpeedTable) -> TableRow | None:
    if not table.geometric_means:
        return None
    cells = tuple(
        TableCell(
            column=column,
            series=series,
            tpot_ms=fmt.milliseconds(table.geometric_means[column.key].tpot_ms),
            interval="",
            tokens_per_second=fmt.tokens_per_second(table.geometric_means[column.key].tokens_per_second),
            step_ms="",
            tokens_per_step="",
            ttft_ms="",
            reason=None,
        )
        for series, column in enumerate(table.columns)
    )
    ups = tuple(_speed_up(table.speed_ups[column.key, None]) for column in table.candidates)
    return TableRow("Geomean", cells, ups)


def _cell(table: SpeedTable, series: int, column: Column, depth: int) -> TableCell:
    cell = table.cells.get((column.key, depth))
    tpot = None if cell is None else cell.tpot
    has_interval = tpot is not None and tpot.low is not None and tpot.high is not None
    return TableCell(
        column=column,
        series=series,
        tpot_ms=fmt.milliseconds(cell.tpot_ms if cell else None),
        interval=fmt.milliseconds_interval(tpot.low or 0.0, tpot.high or 0.0) if tpot and has_interval else "",
        tokens_per_second=fmt.tokens_per_second(cell.tokens_per_second if cell else None),
        step_ms=fmt.milliseconds(cell.step_ms if cell else None),
        tokens_per_step=fmt.tokens_per_step(cell.tokens_per_step if cell else None),
        ttft_ms=fmt.milliseconds(cell.ttft_ms if cell else None),
        reason="not measured" if cell is None else cell.void_reason,
    )


def _speed_up(speed_up: SpeedUp) -> tuple[str, str]:
    return fmt.speed_up(speed_up.ratio), interval_text(speed_up)
