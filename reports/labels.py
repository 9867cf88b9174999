"""Where the values of a chart stand, so that no label covers another or a mark. Both charts place theirs here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

MARK = 8.0  # half the side of the square that a mark keeps free
GAP = 9.0  # from a point to the near edge of its label
CAP = 3.0  # from the end of an interval to whatever is next to it
LEAN = 7.0  # how far a leaning label reaches over its point on the short side

Box = tuple[float, float, float, float]  # left, top, right, bottom; y grows downwards


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
