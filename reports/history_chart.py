"""Small multiples: ms/token of every run in the order measured, one panel a depth, one line a build."""

import io
import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from ..harness import format as fmt
from .chart import BASELINE_STROKE, GRID, INK, MUTED, PAPER, STROKES, SVG_METADATA, Stroke, drawing_style
from .history import History

PANEL_INCHES = (3.4, 2.4)
MOST_DATES = 4


def render_svg(history: History) -> bytes:
    """The panels as SVG; the same history gives the same bytes."""
    with drawing_style():
        stream = io.BytesIO()
        _figure(history).savefig(stream, format="svg", metadata=SVG_METADATA)
        return stream.getvalue()


def render_png(history: History) -> bytes:
    """The panels as PNG at 200 dots an inch."""
    with drawing_style():
        stream = io.BytesIO()
        _figure(history).savefig(stream, format="png", dpi=200, metadata={"Software": None})
        return stream.getvalue()


def _figure(history: History) -> Figure:
    depths = history.depths or (0,)
    columns = min(len(depths), 3 if len(depths) != 4 else 2)
    lines = math.ceil(len(depths) / columns)
    width = columns * PANEL_INCHES[0]
    key_inches = 0.2 * math.ceil(len(history.series) / max(1, int(width / 2.4)))
    height = lines * PANEL_INCHES[1] + 0.5 + key_inches
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    figure.subplots_adjust(
        0.55 / width, 0.45 / height, 1 - 0.15 / width, 1 - (0.75 + key_inches) / height, wspace=0.22, hspace=0.5
    )
    for panel, depth in zip(panels, depths, strict=False):
        _panel(panel, history, depth)
    for panel in panels[len(depths) :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    ncols = max(1, min(len(labels), int(width / 2.4)))
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0, 1 - 0.3 / height),
        ncols=ncols,
        frameon=False,
        fontsize=8.5,
        borderaxespad=0,
        handlelength=2.6,
    )
    figure.text(0.12 / width, 1 - 0.18 / height, "ms/token, run after run", fontsize=10, fontweight="bold", va="center")
    return figure


def _panel(panel: Axes, history: History, depth: int) -> None:
    places = {run: place for place, run in enumerate(history.runs)}
    for index, (series, name) in enumerate(history.series.items()):
        entries = [each for each in history.entries if each.series == series and each.depth == depth and each.tpot_ms]
        stroke = _stroke(index, len(history.series))
        panel.plot(
            [places[each.measured_utc, each.run_id] for each in entries],
            [each.tpot_ms or 0.0 for each in entries],
            color=stroke.colour,
            linestyle=stroke.dash,
            linewidth=1.5,
            marker=stroke.marker,
            markersize=4.5,
            markerfacecolor=stroke.colour if stroke.is_filled else PAPER,
            markeredgewidth=1.2,
            label=name,
        )
    panel.set_title(f"{fmt.count(depth)} tokens of context", fontsize=9, loc="left", color=INK)
    highest = max((each.tpot_ms or 0.0 for each in history.entries if each.depth == depth), default=0.0)
    panel.set_ylim(0, highest * 1.15 or 1.0)
    panel.set_xlim(-0.5, max(len(places) - 0.5, 0.5))
    panel.yaxis.set_major_locator(MaxNLocator(4))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: fmt.axis_number(value)))
    shown = sorted({round(step * (len(places) - 1) / (MOST_DATES - 1)) for step in range(MOST_DATES)}) if places else []
    days = [run[0][5:10] for run in history.runs]
    panel.xaxis.set_major_locator(FixedLocator(shown))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda place, _: days[round(place)]))
    panel.grid(axis="y", color=GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0, labelsize=8)
    panel.tick_params(axis="x", length=3, labelsize=8, color=MUTED)


def _stroke(index: int, count: int) -> Stroke:
    if index == 0 and count > 1:
        return BASELINE_STROKE
    return STROKES[max(index - 1, 0) % len(STROKES)]
