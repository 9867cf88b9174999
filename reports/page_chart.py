"""View A: where every line, point and label of the page's chart lies, for a wide and a narrow sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..harness import format as fmt
from .chart import DATUM_TOKENS_PER_SECOND, Placement, Spot, between, clearest, datum_fits, place, side_by_side
from .table_files import interval_text
from .tables import SpeedCell, SpeedTable

NICE_STEPS = (1.0, 2.0, 2.5, 4.0, 5.0, 10.0)
HEADROOM = 1.14
LABEL_HEIGHT = 16.0
DODGE = 11.0  # between marks that stand side by side
DIMENSION_HEIGHT = 38  # two arrow heads and the ratio between them


@dataclass(frozen=True)
class Paper:
    """The drawing area in SVG units. label_gap: nearer depths share one dimension line; character: width of a digit."""

    name: str
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    label_gap: int
    character: float

    @property
    def x_end(self) -> int:
        """Right end of the axis."""
        return self.width - self.right

    @property
    def y_end(self) -> int:
        """The axis itself: zero."""
        return self.height - self.bottom


WIDE = Paper("wide", 1040, 430, 52, 48, 28, 62, 56, 9.2)
MEDIUM = Paper("medium", 720, 410, 48, 46, 28, 62, 50, 9.2)
NARROW = Paper("narrow", 360, 380, 36, 38, 28, 58, 46, 7.4)


@dataclass(frozen=True)
class Tick:
    """A label on an axis at x or y."""

    at: float
    label: str


@dataclass(frozen=True)
class Point:
    """One cell drawn; description is what a screen reader and the readout say."""

    x: float
    y: float
    y_low: float | None
    y_high: float | None
    label: str
    placement: Placement | None  # None where there is no room; the readout and the table have the value
    description: str
    depth: int
    series: int


@dataclass(frozen=True)
class Series:
    """One column: its points and the line through them."""

    index: int
    label: str
    is_baseline: bool
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        """The line as an SVG path."""
        return "M" + "L".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points) if self.points else ""


@dataclass(frozen=True)
class Ratio:
    """A dimension line with the speed-up."""

    x: float
    y_top: float
    y_bottom: float
    label: str

    @property
    def y_label(self) -> float:
        """Half way."""
        return (self.y_top + self.y_bottom) / 2


@dataclass(frozen=True)
class View:
    """Everything the SVG template draws."""

    paper: Paper
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    series: tuple[Series, ...]
    ratios: tuple[Ratio, ...]
    missing: tuple[Tick, ...]  # "no speed" where a build has none
    datum_y: float | None
    datum_label_x: float


def view(table: SpeedTable, paper: Paper) -> View:
    """Lays the table out on paper: log-2 depths, speeds from zero."""
    highest = table.highest_speed
    top = (highest or DATUM_TOKENS_PER_SECOND) * HEADROOM
    xs = _depth_positions(table.depths, paper)

    def y_of(speed: float) -> float:
        return paper.y_end - speed / top * (paper.y_end - paper.top)

    series = _all_series(table, xs, y_of(0) - y_of(1), paper)
    return View(
        paper=paper,
        x_ticks=tuple(Tick(xs[depth], fmt.depth_short(depth)) for depth in table.depths),
        y_ticks=tuple(Tick(y_of(speed), fmt.axis_number(speed)) for speed in _nice_ticks(top)),
        series=series,
        ratios=_ratios(table, series, paper),
        missing=tuple(Tick(xs[depth], text) for depth in table.depths if (text := table.without_speed(depth))),
        datum_y=y_of(DATUM_TOKENS_PER_SECOND) if highest and datum_fits(top) else None,
        datum_label_x=clearest(
            between(list(xs.values())),
            [[(point.x, point.y) for point in each.points] for each in series],
            y_of(DATUM_TOKENS_PER_SECOND),
        ),
    )


def describe(table: SpeedTable, cell: SpeedCell) -> str:
    """One point in words: "kernarc, 8,192 tokens of context: 139.9 tok/s, 7.15 ms/token, 95 % interval …"."""
    text = (
        f"{cell.column.label}, {fmt.count(cell.depth)} tokens of context: "
        f"{fmt.tokens_per_second(cell.tokens_per_second)} tok/s, {fmt.milliseconds(cell.tpot_ms)} ms/token"
    )
    if cell.tpot is not None and cell.tpot.low is not None and cell.tpot.high is not None:
        text += f", 95 % interval {fmt.milliseconds_interval(cell.tpot.low, cell.tpot.high)} ms"
    speed_up = table.speed_ups.get((cell.column.key, cell.depth))
    if speed_up is None or speed_up.ratio is None:
        return text
    interval = interval_text(speed_up)
    about = f" ({interval})" if interval else ""
    return f"{text}; {fmt.speed_up(speed_up.ratio)} over {table.baseline.label}{about}"


def describe_chart(table: SpeedTable) -> str:
    """The chart in a paragraph, for readers who do not see it."""
    depths = ", ".join(fmt.count(depth) for depth in table.depths)
    sentences = [f"Decode speed of one stream in tokens per second against context depths of {depths} tokens."]
    for column in table.columns:
        speeds = [
            fmt.tokens_per_second(cell.tokens_per_second) if cell.tpot is not None else "no speed"
            for depth in table.depths
            if (cell := table.cells.get((column.key, depth))) is not None
        ]
        sentences.append(f"{column.label}: {', '.join(speeds)}.")
    return " ".join(sentences)


def _depth_positions(depths: Sequence[int], paper: Paper) -> dict[int, float]:
    span = paper.x_end - paper.left
    inset = max(span * 0.05, 26)
    low, high = math.log2(depths[0]), math.log2(depths[-1])
    if high == low:
        return {depths[0]: paper.left + span / 2}
    scale = (span - 2 * inset) / (high - low)
    return {depth: paper.left + inset + (math.log2(depth) - low) * scale for depth in depths}


def _all_series(table: SpeedTable, xs: dict[int, float], y_scale: float, paper: Paper) -> tuple[Series, ...]:
    step = DODGE if table.has_overlapping_intervals else 0.0
    shown = [
        (
            index,
            cell,
            xs[depth] + side_by_side(index, len(table.columns), step),
            paper.y_end - cell.tokens_per_second * y_scale,
        )
        for index, column in enumerate(table.columns)
        for depth in table.depths
        if (cell := table.cells.get((column.key, depth))) is not None and cell.tokens_per_second is not None
    ]
    labels = [fmt.tokens_per_second(cell.tokens_per_second) for _, cell, _, _ in shown]
    spots = []
    for (_, cell, x, y), label in zip(shown, labels, strict=True):
        down, up = cell.tokens_per_second_reach
        spots.append(Spot(x, y, len(label) * paper.character, up * y_scale, down * y_scale))
    bounds = (float(paper.left), 0.0, float(paper.width), float(paper.y_end))
    placements = place(spots, height=LABEL_HEIGHT, bounds=bounds)
    points: dict[int, list[Point]] = {}
    for (index, cell, x, y), label, placement in zip(shown, labels, placements, strict=True):
        interval = cell.tokens_per_second_interval
        low, high = (None, None) if interval is None else (paper.y_end - end * y_scale for end in interval)
        points.setdefault(index, []).append(
            Point(x, y, low, high, label, placement, describe(table, cell), cell.depth, index)
        )
    is_pair = len(table.columns) > 1
    return tuple(
        Series(index, column.label, is_pair and index == 0, tuple(points.get(index, ())))
        for index, column in enumerate(table.columns)
    )


def _ratios(table: SpeedTable, series: Sequence[Series], paper: Paper) -> tuple[Ratio, ...]:
    """Dimension lines between the baseline and the one candidate, from the deepest depth, none over another."""
    if len(table.candidates) != 1:
        return ()
    upper = {point.depth: point for point in series[1].points}
    found: list[Ratio] = []
    for point in reversed(series[0].points):
        other, speed_up = upper.get(point.depth), table.speed_ups[table.candidates[0].key, point.depth]
        if other is None or speed_up.ratio is None or (found and found[-1].x - point.x < paper.label_gap):
            continue
        top, bottom = sorted((point, other), key=lambda each: each.y)
        y_top, y_bottom = max(top.y, top.y_low or 0) + 10, min(bottom.y, bottom.y_high or bottom.y) - 10
        if y_bottom - y_top >= DIMENSION_HEIGHT:
            label = fmt.speed_up(speed_up.ratio) + ("*" if speed_up.is_derived else "")
            found.append(Ratio((point.x + other.x) / 2, y_top, y_bottom, label))
    return tuple(found)


def _nice_ticks(top: float) -> list[float]:
    rough = top / 5
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(step * magnitude for step in NICE_STEPS if step * magnitude >= rough)
    return [step * index for index in range(int(top / step) + 1)]
