"""The table as Markdown, CSV, JSON and terminal text. All four print the same cells through format.py."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from ..harness import format as fmt
from ..harness.run.records import BuildRecord
from . import frames
from .frames import Row, settled
from .speed_ups import SpeedUp
from .tables import Column, SpeedCell, SpeedTable

SCHEMA_VERSION = 1
GEOMEAN = "Geomean"
INTERVAL = "95 % CI"
HEADERS = (
    "Context",
    "Build",
    "tok/s",
    "ms/token",
    INTERVAL,
    "ms/step",
    "tokens/step",
    "first token ms",
    "speed-up",
    INTERVAL,
)
WORDS = ("Build",)  # the other columns hold numbers
NARROW_HEADERS = {"tokens/step": "tokens\n/step", "first token ms": "first\ntoken ms"}
WIDE = 100  # terminal columns from which intervals are shown
CSV_FIELDS = (
    "depth",
    "build",
    "run_id",
    "measured_on",
    "tokens_per_second",
    "tpot_ms",
    "tpot_ms_low",
    "tpot_ms_high",
    "step_ms",
    "tokens_per_step",
    "ttft_ms",
    "streams",
    "void_streams",
    "is_checked",
    "void_reason",
    "speed_up",
    "speed_up_low",
    "speed_up_high",
    "speed_up_kind",
)


def markdown(table: SpeedTable) -> str:
    """table.md, with its conditions below."""
    return frames.markdown(HEADERS, _text_rows(table), table_notes(table), words=WORDS)


def rows(table: SpeedTable) -> list[Row]:
    """One flat row a depth and build, settled numbers, units in the names."""
    return [_row(table, cell) for cell in _cells(table)]


def csv_text(table: SpeedTable) -> str:
    """table.csv: one row a depth and build."""
    return frames.csv_text(CSV_FIELDS, rows(table))


def document(table: SpeedTable) -> dict[str, object]:
    """`{schema_version, columns, depths, cells, geometric_mean}`; a missing number is null."""
    return {
        "schema_version": SCHEMA_VERSION,
        "baseline": table.baseline.label,
        "columns": [
            {"build": c.label, "run_id": c.run_id, "measured_on": c.measured_on, "engine": c.build.engine}
            for c in table.columns
        ],
        "depths": list(table.depths),
        "cells": rows(table),
        "geometric_mean": {"depths": list(table.geometric_mean_depths), "columns": _geometric_means(table)},
    }


def terminal_table(table: SpeedTable, width: int = WIDE) -> Table:
    """The same table for a rich console; the intervals stay out where `width` columns cannot hold them."""
    shown = [place for place, header in enumerate(HEADERS) if width >= WIDE or header != INTERVAL]
    view = frames.terminal_table([NARROW_HEADERS.get(HEADERS[place], HEADERS[place]) for place in shown], words=WORDS)
    previous = ""
    for row in _text_rows(table):
        if previous and row[0] != previous:
            view.add_section()
        texts = [Text("" if place == 0 and row[0] == previous else row[place]) for place in shown]
        view.add_row(*texts, style="bold" if row[0] == GEOMEAN else None)
        previous = row[0]
    return view


def table_notes(table: SpeedTable) -> list[str]:
    """What a reader must know beside the numbers: reasons for empty cells, pairing, what an interval holds."""
    notes = _missing_speeds(table)
    unchecked = [cell for cell in _cells(table) if cell.tpot is not None and not cell.is_checked]
    if unchecked:
        notes.append("Outputs not checked yet: `kernarc-gate check RUN_DIR` compares every token with the reference.")
    shown = [speed_up for speed_up in table.speed_ups.values() if speed_up.ratio is not None]
    if any(not speed_up.is_derived for speed_up in shown):
        notes.append(
            f"Speed-up over {table.baseline.label}: same requests in the same run, geometric mean of the "
            "per-request ratios with its 95 % interval."
        )
    if any(speed_up.is_derived for speed_up in shown):
        notes.append("derived: a ratio of medians from different sessions, not a measurement, so it has no interval.")
    notes += structured_notes(table)
    notes += [
        f"{column.label}: {draft_head(column.build)}; verification reads all of them, so the output is the same."
        for column in table.columns
        if column.build.draft_vocab_size is not None
    ]
    reasons = dict.fromkeys(speed_up.reason for speed_up in table.speed_ups.values() if speed_up.reason)
    notes += [f"No speed-up: {reason}." for reason in reasons]
    if any(s.launches == 1 for s in table.speed_ups.values() if s.ratio is not None and not s.is_derived):
        notes.append("One launch of each engine: the interval holds the requests' spread, not that between launches.")
    notes += _repeat_notes(table)
    notes += _crowded_notes(table)
    if table.geometric_mean_depths and table.geometric_mean_depths != table.depths:
        over = ", ".join(fmt.count(depth) for depth in table.geometric_mean_depths)
        notes.append(f"Geometric mean over the depths at which every build has a speed: {over}.")
    return notes


def _repeat_notes(table: SpeedTable) -> list[str]:
    """Several launches of a server that nobody restarts are one launch, repeated."""
    repeated = {
        cell.column.label: None
        for cell in _cells(table)
        if cell.column.build.engine == "endpoint" and cell.tpot is not None and cell.tpot.launches > 1
    }
    return [
        f"{label}: not restarted between launches, so its intervals hold the spread of repeats, not that of launches."
        for label in repeated
    ]


def _crowded_notes(table: SpeedTable) -> list[str]:
    """Speeds that a neighbour's engine may have cost: said beside the numbers, not on the page alone."""
    counts = (
        (column, sum(cell.streams for cell in _cells(table) if cell.column is column)) for column in table.columns
    )
    return [
        f"{column.label}: {fmt.count(column.crowded_streams)} of {fmt.count(streams)} streams were measured while "
        "another engine was using the processor, so may be too slow; `residency: alternate` measures one at a time."
        for column, streams in counts
        if column.crowded_streams
    ]


def structured_notes(table: SpeedTable) -> list[str]:
    """That weights were made, not trained, so that nobody takes the run for one of a released model."""
    made = {column.label: column.build.structured_acceptance for column in table.columns}
    by_acceptance: dict[float, list[str]] = {}
    for label, acceptance in made.items():
        if acceptance is not None:
            by_acceptance.setdefault(acceptance, []).append(label)
    return [
        f"{_subject(labels, len(made), 'structured weights')} of the model's shape, made for a known output and "
        f"a draft acceptance of {acceptance:g}, not trained.{_cut_heads(table)}"
        for acceptance, labels in by_acceptance.items()
    ]


def _cut_heads(table: SpeedTable) -> str:
    if all(column.build.draft_vocab_size is None for column in table.columns):
        return ""
    return " A draft head cut to the tokens that they emit loses no draft here; on text it loses some."


def _subject(labels: list[str], columns: int, noun: str) -> str:
    """ "Noun" where it holds of every column, else "build, build: noun"."""
    return noun.capitalize() if len(labels) == columns else f"{', '.join(labels)}: {noun}"


def draft_head(build: BuildRecord) -> str:
    """What a build drafts from."""
    return f"draft head over {fmt.count(build.draft_vocab_size or 0)} of {fmt.count(build.vocab_size or 0)} tokens"


def _cells(table: SpeedTable) -> Iterator[SpeedCell]:
    for depth in table.depths:
        for column in table.columns:
            if (cell := table.cells.get((column.key, depth))) is not None:
                yield cell


def _missing_speeds(table: SpeedTable) -> list[str]:
    """One note a reason, with the cells that it empties."""
    empty: dict[str, dict[str, list[str]]] = {}
    for cell in _cells(table):
        if cell.void_reason is not None:
            empty.setdefault(cell.void_reason, {}).setdefault(cell.column.label, []).append(fmt.count(cell.depth))
    notes = []
    for reason, cells in empty.items():
        where = "; ".join(f"{label} at {', '.join(depths)}" for label, depths in cells.items())
        notes.append(f"No speed for {where}: {reason}.")
    return notes


def _text_rows(table: SpeedTable) -> Iterator[tuple[str, ...]]:
    for cell in _cells(table):
        interval = ""
        if cell.tpot is not None and cell.tpot.low is not None and cell.tpot.high is not None:
            interval = fmt.milliseconds_interval(cell.tpot.low, cell.tpot.high)
        yield (
            fmt.count(cell.depth),
            cell.column.label,
            fmt.tokens_per_second(cell.tokens_per_second) if cell.tpot is not None else "no speed",
            fmt.milliseconds(cell.tpot_ms),
            interval,
            fmt.milliseconds(cell.step_ms),
            fmt.tokens_per_step(cell.tokens_per_step),
            fmt.milliseconds(cell.ttft_ms),
            *_speed_up_texts(table, cell.column, cell.depth),
        )
    for mean in table.geometric_means.values():
        speeds = (fmt.tokens_per_second(mean.tokens_per_second), fmt.milliseconds(mean.tpot_ms))
        yield (GEOMEAN, mean.column.label, *speeds, "", "", "", "", *_speed_up_texts(table, mean.column, None))


def _speed_up_texts(table: SpeedTable, column: Column, depth: int | None) -> tuple[str, str]:
    speed_up = table.speed_ups.get((column.key, depth))
    if speed_up is None:
        return "", ""
    return fmt.speed_up(speed_up.ratio), interval_text(speed_up)


def interval_text(speed_up: SpeedUp) -> str:
    """The interval of a paired speed-up, "derived" for one across sessions, "" where there is no ratio."""
    if speed_up.ratio is None:
        return ""
    if speed_up.is_derived:
        return "derived"
    if speed_up.low is None or speed_up.high is None:
        return ""
    return fmt.speed_up_interval(speed_up.low, speed_up.high)


def _row(table: SpeedTable, cell: SpeedCell) -> Row:
    return {
        "depth": cell.depth,
        "build": cell.column.label,
        "run_id": cell.column.run_id,
        "measured_on": cell.column.measured_on,
        "tokens_per_second": settled(cell.tokens_per_second),
        "tpot_ms": settled(cell.tpot_ms),
        "tpot_ms_low": settled(cell.tpot.low if cell.tpot else None),
        "tpot_ms_high": settled(cell.tpot.high if cell.tpot else None),
        "step_ms": settled(cell.step_ms),
        "tokens_per_step": settled(cell.tokens_per_step),
        "ttft_ms": settled(cell.ttft_ms),
        "streams": cell.streams,
        "void_streams": cell.void_streams,
        "is_checked": cell.is_checked,
        "void_reason": cell.void_reason,
        **_speed_up_fields(table.speed_ups.get((cell.column.key, cell.depth))),
    }


def _speed_up_fields(speed_up: SpeedUp | None) -> Row:
    if speed_up is None or speed_up.ratio is None:
        return {"speed_up": None, "speed_up_low": None, "speed_up_high": None, "speed_up_kind": None}
    return {
        "speed_up": settled(speed_up.ratio),
        "speed_up_low": settled(speed_up.low),
        "speed_up_high": settled(speed_up.high),
        "speed_up_kind": "derived" if speed_up.is_derived else "paired",
    }


def _geometric_means(table: SpeedTable) -> list[Row]:
    return [
        {
            "build": mean.column.label,
            "tpot_ms": settled(mean.tpot_ms),
            "tokens_per_second": settled(mean.tokens_per_second),
            **_speed_up_fields(table.speed_ups.get((mean.column.key, None))),
        }
        for mean in table.geometric_means.values()
    ]
