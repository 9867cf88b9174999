"""The title block: drawing number, revision, date and scale. The number is the records' own fingerprint."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..harness import format as fmt
from .saved import SavedRun
from .tables import SpeedCell, SpeedTable


@dataclass(frozen=True)
class TitleBlock:
    """The sheet's corner; all text."""

    headline: str
    summary: str
    drawing_number: str
    revision: str
    date: str
    model: str
    hardware: str
    checked: str


def title_block(runs: Sequence[SavedRun], table: SpeedTable, revision: str) -> TitleBlock:
    """Filled from the records; the same records have the same number in any order and on any machine."""
    environments = (run.manifest.environment for run in runs)
    hardware = dict.fromkeys(each.gpu_name or each.cpu_model for each in environments)
    subject = table.subject
    cells = [cell for cell in table.cells.values() if cell.column is subject and cell.tpot is not None]
    return TitleBlock(
        headline=_headline(subject.label, cells),
        summary=_summary(table, [cell.depth for cell in cells] or list(table.depths)),
        drawing_number=drawing_number(runs),
        revision=revision,
        date=max(run.manifest.created_utc[:10] for run in runs),
        model=", ".join(dict.fromkeys(fmt.model_name(column.build.model) for column in table.columns)),
        hardware=", ".join(hardware),
        checked=_checked(table),
    )


def drawing_number(runs: Sequence[SavedRun]) -> str:
    """KG- and six hex digits of the sha256 over every measured stream."""
    digest = hashlib.sha256()
    for run in runs:
        for stream in run.streams:
            younger = None if stream.busy_neighbours else {"busy_neighbours"}  # an older record keeps its number
            digest.update(stream.model_dump_json(exclude=younger).encode())
    return f"KG-{digest.hexdigest()[:6].upper()}"


def _headline(label: str, cells: Sequence[SpeedCell]) -> str:
    speeds = [cell.tokens_per_second for cell in cells if cell.tokens_per_second is not None]
    if not speeds:
        return f"{label}: no speed to show"
    low, high = fmt.tokens_per_second(min(speeds)), fmt.tokens_per_second(max(speeds))
    spread = low if low == high else f"{low} to {high}"
    return f"{label}: {spread} tokens per second"


def _summary(table: SpeedTable, shown: Sequence[int]) -> str:
    """shown: the depths that the headline speaks of."""
    low, high = fmt.count(min(shown)), fmt.count(max(shown))
    depths = f"at {low} tokens of context" if low == high else f"from {low} to {high} tokens of context"
    text = f"One stream, greedy, {depths}."
    if not table.candidates:
        return text
    speed_up = table.speed_ups[table.subject.key, None]
    if speed_up.ratio is None:
        return text
    kind = "derived from two sessions" if speed_up.is_derived else "paired requests"
    if speed_up.low is not None and speed_up.high is not None:
        kind += f", 95 % interval {fmt.speed_up_interval(speed_up.low, speed_up.high)}"
    return f"{text} {fmt.speed_up(speed_up.ratio)} over {table.baseline.label} ({kind})."


def _checked(table: SpeedTable) -> str:
    shown = [cell for cell in table.cells.values() if cell.tpot is not None]
    if len(shown) < len(table.cells):
        return f"{len(shown)} of {len(table.cells)} cells"
    return "all outputs" if table.is_checked else "not yet"
