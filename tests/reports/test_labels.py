"""Labels: none over another or over a mark, whatever the points; inside the drawing."""

from hypothesis import given
from hypothesis import strategies as st
from kernarc.reports.chart import MARK, Placement, Spot, datum_fits, place

HEIGHT = 16.0
BOUNDS = (0.0, 0.0, 400.0, 300.0)

points = st.lists(
    st.tuples(st.sampled_from([30.0, 200.0, 240.0, 262.0]), st.integers(20, 280)), min_size=1, max_size=12, unique=True
)


def box(spot: Spot, placement: Placement) -> tuple[float, float, float, float]:
    left = placement.x - {"start": 0, "middle": spot.width / 2, "end": spot.width}[placement.anchor]
    return left, placement.y - HEIGHT / 2, left + spot.width, placement.y + HEIGHT / 2


def overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@given(points, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=12, max_size=12))
def test_placed_labels_cover_nothing(found: list[tuple[float, int]], reaches: list[tuple[int, int]]) -> None:
    """No other label, no mark, and no interval."""
    spots = [
        Spot(x, float(y), 46.0, float(up), float(down)) for (x, y), (up, down) in zip(found, reaches, strict=False)
    ]
    placed = place(spots, height=HEIGHT, bounds=BOUNDS)
    boxes = [box(spot, each) for spot, each in zip(spots, placed, strict=True) if each is not None]
    for index, one in enumerate(boxes):
        assert BOUNDS[0] <= one[0] <= one[2] <= BOUNDS[2]
        assert BOUNDS[1] <= one[1] <= one[3] <= BOUNDS[3]
        assert not any(overlap(one, other) for other in boxes[index + 1 :])
        for spot in spots:
            mark = (spot.x - MARK, spot.y - MARK, spot.x + MARK, spot.y + MARK)
            interval = (spot.x - 4, spot.y - spot.up, spot.x + 4, spot.y + spot.down)
            assert not overlap(one, mark)
            assert not overlap(one, interval)


def test_of_two_builds_the_faster_is_labelled_above_and_the_slower_below() -> None:
    above, below = place([Spot(200, 120, 46), Spot(200, 100, 46)], height=HEIGHT, bounds=BOUNDS)[::-1]
    assert above is not None
    assert below is not None
    assert above.y < 100
    assert below.y > 120


def test_the_promised_speed_is_drawn_where_it_can_be_read() -> None:
    """Not beyond the paper, and not where the axis would run through its label."""
    assert [datum_fits(top) for top in (99.0, 100.0, 480.0, 2500.0, 2501.0, 15_000.0)] == [
        False,
        *[True] * 3,
        False,
        False,
    ]
