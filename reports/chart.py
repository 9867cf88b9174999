"""speed.svg and speed.png, and where labels stand in both charts. The same table gives the same bytes."""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ..harness import format as fmt
from .tables import Column, SpeedCell, SpeedTable

DATUM_TOKENS_PER_SECOND = 100.0
INK, MUTED, GRID, PAPER = "#14202b", "#5b6873", "#dfe4e8", "#ffffff"
PAPER_BOX = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}  # a label is never crossed by a line
FIGURE_INCHES = (7.2, 4.8)
AXES_BOX = (0.085, 0.2, 0.885, 0.64)  # left, bottom, width, height in parts of the figure
AXES_POINTS = (FIGURE_INCHES[0] * AXES_BOX[2] * 72, FIGURE_INCHES[1] * AXES_BOX[3] * 72)
VALUE_POINTS = 9.5
DODGE_POINTS = 9.0  # between marks that stand side by side
SIDES = {"start": "left", "middle": "center", "end": "right"}
MARK = 8.0  # half the side of the square that a mark keeps free
GAP = 9.0  # from a point to the near edge of its label
CAP = 3.0  # from the end of an interval to whatever is next to it
LEAN = 7.0  # how far a leaning label reaches over its point on the short side

Box = tuple[float, float, float, float]  # left, top, right, bottom; y grows downwards
RC: dict[Any, Any] = {
    "svg.hashsalt": "kernarc-gate",
    "svg.fonttype": "path",  # glyphs as outlines: no reader's font can change the drawing
    "font.family": "DejaVu Sans",  # ships with matplotlib
    "font.size": 10.0,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.8,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "xtick.color": INK,
    "ytick.color": INK,
    "path.simplify": False,
}


SVG_METADATA = {"Date": None, "Creator": None, "Type": None, "Format": None}


@dataclass(frozen=True)
class Stroke:
    """How a column is drawn: told apart by colour, by dash and by marker, so that grey print loses nothing."""

    colour: str
    dash: str | tuple[float, tuple[float, ...]]
    marker: str
    is_filled: bool


BASELINE_STROKE = Stroke("#7a8691", "--", "s", False)
# Okabe and Ito's palette, the strong blue first; lightness differs from the baseline's grey
STROKES = (
    Stroke("#005a9c", "-", "o", True),
    Stroke("#b34700", "-.", "^", True),
    Stroke("#00735c", ":", "D", True),
    Stroke("#7a3b78", (0, (5, 1, 1, 1, 1, 1)), "v", True),
)


def render_svg(table: SpeedTable) -> bytes:
    """The chart as SVG, without date, creator or fonts to load."""
    with _drawn(table) as figure:
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata=SVG_METADATA)
        return stream.getvalue()


def render_png(table: SpeedTable) -> bytes:
    """The chart as PNG at 200 dots an inch, without metadata."""
    with _drawn(table) as figure:
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=200, metadata={"Software": None})
        return stream.getvalue()


def stroke_of(table: SpeedTable, column: Column) -> Stroke:
    """The first column is the quiet baseline, the others take the palette in order."""
    index = table.columns.index(column)
    if index == 0 and len(table.columns) > 1:
        return BASELINE_STROKE
    return STROKES[max(index - 1, 0) % len(STROKES)]


@contextmanager
def drawing_style() -> Iterator[None]:
    """Our settings and nobody else's: a reader's matplotlibrc must not reach a drawing."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(RC)
        yield


@contextmanager
def _drawn(table: SpeedTable) -> Iterator[Figure]:
    with drawing_style():
        figure = Figure(figsize=FIGURE_INCHES, layout=None, facecolor=PAPER)
        axes = figure.add_axes(AXES_BOX)
        top = _draw_axes(axes, table)
        _draw_columns(axes, table)
        _draw_values(axes, table)
        _draw_datum(axes, table, top)
        _draw_dimension_lines(axes, table, top)
        _draw_reasons(axes, table)
        _draw_key(figure, table)
        yield figure


def _draw_columns(axes: Axes, table: SpeedTable) -> None:
    for order, column in enumerate(table.columns):
        stroke = stroke_of(table, column)
        cells = [cell for cell in table.cells.values() if cell.column is column and cell.tokens_per_second is not None]
        axes.plot(
            [_place_of(axes, table, cell) for cell in cells], [cell.tokens_per_second or 0.0 for cell in cells],
            color=stroke.colour, linestyle=stroke.dash, linewidth=1.8, marker=stroke.marker, markersize=6.5,
            markerfacecolor=stroke.colour if stroke.is_filled else PAPER, markeredgecolor=stroke.colour,
            markeredgewidth=1.5, zorder=10 + order, label=column.label,
        )  # fmt: skip
        for cell in cells:
            if cell.tokens_per_second_interval is not None:
                axes.errorbar(
                    [_place_of(axes, table, cell)], [cell.tokens_per_second or 0.0],
                    yerr=[[reach] for reach in cell.tokens_per_second_reach], color=stroke.colour, elinewidth=1.2,
                    capsize=4, capthick=1.2, fmt="none", zorder=9,
                )  # fmt: skip


def _draw_values(axes: Axes, table: SpeedTable) -> None:
    """Every speed beside its mark, placed in points from the top left of the axes."""
    shown = [(cell, cell.tokens_per_second) for cell in table.cells.values() if cell.tokens_per_second is not None]
    points_a_token = AXES_POINTS[1] / axes.get_ylim()[1]
    spots = []
    for cell, speed in shown:
        down, up = cell.tokens_per_second_reach
        x, y = _in_points(axes, _place_of(axes, table, cell), speed)
        width = len(fmt.tokens_per_second(speed)) * VALUE_POINTS * 0.68
        spots.append(Spot(x, y, width, up * points_a_token, down * points_a_token))
    bounds = (-20.0, -20.0, AXES_POINTS[0] + 15, AXES_POINTS[1])
    placements = place(spots, height=VALUE_POINTS * 1.3, bounds=bounds)
    for (cell, speed), spot, placement in zip(shown, spots, placements, strict=True):
        if placement is None:
            continue
        stroke = stroke_of(table, cell.column)
        axes.annotate(
            fmt.tokens_per_second(speed), (_place_of(axes, table, cell), speed),
            xytext=(placement.x - spot.x, spot.y - placement.y), textcoords="offset points",
            ha=SIDES[placement.anchor], va="center_baseline", fontsize=VALUE_POINTS,
            color=stroke.colour if stroke.is_filled else MUTED, fontweight="bold" if stroke.is_filled else "normal",
            bbox=PAPER_BOX, zorder=20,
        )  # fmt: skip


def _place_of(axes: Axes, table: SpeedTable, cell: SpeedCell) -> float:
    """A cell's depth, a few points aside where the builds' intervals would cover each other."""
    if not table.has_overlapping_intervals:
        return float(cell.depth)
    low, high = (math.log2(end) for end in axes.get_xlim())
    points = side_by_side(table.columns.index(cell.column), len(table.columns), DODGE_POINTS)
    return float(cell.depth * 2 ** (points / AXES_POINTS[0] * (high - low)))


def _in_points(axes: Axes, depth: float, speed: float) -> tuple[float, float]:
    """Data to points from the top left of the axes, y downwards."""
    low, high = (math.log2(end) for end in axes.get_xlim())
    return (math.log2(depth) - low) / (high - low) * AXES_POINTS[0], (1 - speed / axes.get_ylim()[1]) * AXES_POINTS[1]


def _draw_axes(axes: Axes, table: SpeedTable) -> float:
    axes.set_xscale("log", base=2)
    low, high = min(table.depths), max(table.depths)
    margin = (high / low) ** 0.075 if high > low else 2.0
    axes.set_xlim(low / margin, high * margin)
    axes.xaxis.set_major_locator(FixedLocator(list(table.depths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda depth, _: _depth_label(table, round(depth))))
    axes.set_xlabel("Context depth, tokens (log 2)", labelpad=7)
    top = (table.highest_speed or DATUM_TOKENS_PER_SECOND) * 1.17
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 4, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda speed, _: fmt.axis_number(speed)))
    axes.grid(axis="y", color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0, pad=6)
    axes.tick_params(axis="x", length=5, width=0.8, pad=5)
    return top


def datum_fits(top: float) -> bool:
    """Whether an axis from 0 to `top` tok/s holds the datum line, and not so low that the axis crosses its label."""
    return 0.04 * top <= DATUM_TOKENS_PER_SECOND <= top


def _draw_datum(axes: Axes, table: SpeedTable, top: float) -> None:
    """The published promise as a chain line, labelled where the builds' lines keep clear of it."""
    if not datum_fits(top) or table.highest_speed is None:
        return
    lines = [
        [(math.log2(depth), cell.tokens_per_second) for depth in table.depths
         if (cell := table.cells.get((column.key, depth))) and cell.tokens_per_second is not None]
        for column in table.columns
    ]  # fmt: skip
    places = between([math.log2(depth) for depth in table.depths])
    where = 2 ** clearest(places, lines, DATUM_TOKENS_PER_SECOND)
    axes.axhline(DATUM_TOKENS_PER_SECOND, color=INK, linewidth=0.9, linestyle=(0, (12, 3, 2, 3)), zorder=2)
    axes.annotate(
        "100 tok/s", (where, DATUM_TOKENS_PER_SECOND), xytext=(0, -1), textcoords="offset points", ha="center",
        va="center", fontsize=8.5, color=INK, bbox=PAPER_BOX, zorder=2.5,
    )  # fmt: skip


def _draw_dimension_lines(axes: Axes, table: SpeedTable, top: float) -> None:
    """A fine dimension line between baseline and candidate where they are apart; the ratio stands below the depth."""
    if len(table.candidates) != 1:
        return
    for depth in table.depths:
        ends = [table.cells.get((column.key, depth)) for column in table.columns]
        reaches = sorted(
            cell.tokens_per_second_interval or (cell.tokens_per_second, cell.tokens_per_second)
            for cell in ends
            if cell is not None and cell.tokens_per_second is not None
        )
        if len(reaches) == 2 and reaches[1][0] - reaches[0][1] > top * 0.16:
            axes.annotate(
                "", (depth, reaches[1][0]), xytext=(depth, reaches[0][1]), zorder=1,
                arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 6, "shrinkB": 6},
            )  # fmt: skip


def _depth_label(table: SpeedTable, depth: int) -> str:
    """ "8K", with the speed-up below it where there is one candidate."""
    label = fmt.depth_short(depth)
    if len(table.candidates) != 1:
        return label
    speed_up = table.speed_ups[table.candidates[0].key, depth]
    if speed_up.ratio is None:
        return label
    return f"{label}\n{fmt.speed_up(speed_up.ratio)}{'*' if speed_up.is_derived else ''}"


def _draw_reasons(axes: Axes, table: SpeedTable) -> None:
    """Where a build has no speed, the axis says so; the outermost labels lean inwards."""
    for index, depth in enumerate(table.depths):
        side = "left" if index == 0 else "right" if index == len(table.depths) - 1 else "center"
        axes.annotate(
            table.without_speed(depth), (depth, 0), xytext=(0, 5), textcoords="offset points", ha=side, va="bottom",
            fontsize=7.5, color=MUTED, zorder=9,
        )  # fmt: skip


def _draw_key(figure: Figure, table: SpeedTable) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.text(0.03, 0.95, "Decode tok/s, one stream", fontsize=11, fontweight="bold", va="center")
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(0.02, 0.93), ncols=min(len(labels), 4), frameon=False,
        fontsize=9.5, handlelength=2.6, columnspacing=1.8, labelcolor=INK, borderaxespad=0, borderpad=0.4,
    )  # fmt: skip
    about = "bars: 95 % interval of the median"
    if len(table.candidates) == 1 and table.speed_ups[table.subject.key, None].ratio is not None:
        about += f"; ×: speed-up over {table.baseline.label}"
        about += ", * derived from two sessions" if table.has_derived else ""
    figure.text(0.97, 0.018, about, fontsize=7.5, color=MUTED, ha="right", va="bottom")


@dataclass(frozen=True)
class Spot:
    """A point that wants a label of this width; its interval reaches so far up and down from it."""

    x: float
    y: float
    width: float
    up: float = 0.0
    down: float = 0.0


@dataclass(frozen=True)
class Placement:
    """The label's anchor point (its vertical centre) and how it is anchored: start, middle or end."""

    x: float
    y: float
    anchor: str


def place(spots: Sequence[Spot], *, height: float, bounds: Box) -> list[Placement | None]:
    """A place for every label, None where there is no free one; the highest point of a depth chooses first.

    At each x the highest label stands above its point, the lowest below, those between wherever there is room.
    """
    taken = [_mark(spot) for spot in spots]
    placements: list[Placement | None] = [None] * len(spots)
    for index in sorted(range(len(spots)), key=lambda each: (spots[each].y, spots[each].x)):
        spot = spots[index]
        others = [box for box in taken if box != _mark(spot)]
        for placement, box in _choices(spot, height, _rank(spot, spots)):
            if _inside(box, bounds) and not any(_overlap(box, other) for other in others):
                placements[index] = placement
                taken.append(box)
                break
    return placements


def _rank(spot: Spot, spots: Sequence[Spot]) -> str:
    """Highest, lowest or between, among the points of this depth (they may stand side by side)."""
    heights = sorted(other.y for other in spots if abs(other.x - spot.x) < 2 * MARK)
    if spot.y == heights[0]:
        return "highest"
    return "lowest" if spot.y == heights[-1] else "between"


def _choices(spot: Spot, height: float, rank: str) -> Iterator[tuple[Placement, Box]]:
    above = spot.y - max(GAP, spot.up + CAP) - height / 2
    below = spot.y + max(GAP, spot.down + CAP) + height / 2
    beside = [(spot.x + MARK + 4, spot.y, "start"), (spot.x - MARK - 4, spot.y, "end")]
    over = [(spot.x, above, "middle"), (spot.x + LEAN, above, "end"), (spot.x - LEAN, above, "start")]
    under = [(spot.x, below, "middle"), (spot.x + LEAN, below, "end"), (spot.x - LEAN, below, "start")]
    order = {"highest": over + beside + under, "lowest": under + beside + over, "between": under + over + beside}
    for x, y, anchor in order[rank]:
        left = x - {"start": 0.0, "middle": spot.width / 2, "end": spot.width}[anchor]
        yield Placement(x, y, anchor), (left, y - height / 2, left + spot.width, y + height / 2)


def _mark(spot: Spot) -> Box:
    return (spot.x - MARK, spot.y - max(MARK, spot.up + CAP), spot.x + MARK, spot.y + max(MARK, spot.down + CAP))


def _inside(box: Box, bounds: Box) -> bool:
    return box[0] >= bounds[0] and box[1] >= bounds[1] and box[2] <= bounds[2] and box[3] <= bounds[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def clearest(candidates: Sequence[float], lines: Sequence[Sequence[tuple[float, float]]], y: float) -> float:
    """The x among the candidates at which every line keeps furthest from y; the first of equals."""

    def room(x: float) -> float:
        distances = [
            abs(top + (bottom - top) * (x - left) / (right - left) - y)
            for line in lines
            for (left, top), (right, bottom) in pairwise(line)
            if left <= x <= right and right > left
        ]
        return round(min(distances, default=0.0), 3)

    return max(candidates, key=room)


def between(xs: Sequence[float]) -> list[float]:
    """Places for a label that names a line: half, a quarter and three quarters of the way across the wide gaps."""
    gaps = sorted(pairwise(xs), key=lambda gap: gap[0] - gap[1])
    wide = [(left, right) for left, right in gaps if right - left > 0.6 * (gaps[0][1] - gaps[0][0])]
    return [left + (right - left) * part for left, right in wide for part in (0.5, 0.25, 0.75)] or list(xs)


def side_by_side(index: int, count: int, step: float) -> float:
    """How far the index-th of count marks stands from the middle."""
    return (index - (count - 1) / 2) * step
