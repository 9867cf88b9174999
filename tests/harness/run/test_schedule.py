"""ABBA: every build answers every request once a launch, and no build is favoured by the clock."""

from collections import Counter, defaultdict

import pytest
from kernarc.harness.run.schedule import Slot, launch_order, launch_schedule, warmup_schedule


def blocks_of(slots: list[Slot]) -> dict[int, list[Slot]]:
    blocks: dict[int, list[Slot]] = defaultdict(list)
    for slot in slots:
        blocks[slot.block].append(slot)
    return blocks


@pytest.mark.parametrize("builds", [["a"], ["a", "b"], ["a", "b", "c"]])
@pytest.mark.parametrize("requests_per_depth", [1, 4, 5])
def test_every_build_answers_every_request_once(builds: list[str], requests_per_depth: int) -> None:
    slots = launch_schedule(builds, [128, 1024], requests_per_depth, launch=2, seed=5)
    assert [slot.order for slot in slots] == list(range(len(builds) * 2 * requests_per_depth))
    wanted = {(b, f"d{d}-l2-r{n}") for b in builds for d in (128, 1024) for n in range(requests_per_depth)}
    assert Counter((slot.build, slot.request_id) for slot in slots) == Counter(wanted)


def test_blocks_are_abba() -> None:
    for block in blocks_of(launch_schedule(["a", "b"], [128, 1024], 6, launch=0, seed=5)).values():
        assert "".join(slot.build for slot in block) in ("abba", "baab")
        assert len({slot.depth for slot in block}) == 1
        assert block[0].request_id == block[1].request_id != block[2].request_id == block[3].request_id


def test_mean_position_of_each_build_is_equal_inside_every_full_block() -> None:
    for block in blocks_of(launch_schedule(["a", "b", "c"], [64], 8, launch=0, seed=1)).values():
        mean = {b: sum(slot.order for slot in block if slot.build == b) / 2 for b in "abc"}
        assert len(set(mean.values())) == 1


def test_both_orders_occur_and_every_round_meets_every_depth() -> None:
    slots = launch_schedule(["a", "b"], [64, 128, 256], 40, launch=0, seed=1)
    firsts = Counter(block[0].build for block in blocks_of(slots).values())
    assert min(firsts["a"], firsts["b"]) > 15
    depths = [block[0].depth for block in blocks_of(slots).values()]
    assert all(set(depths[n : n + 3]) == {64, 128, 256} for n in range(0, len(depths), 3))


@pytest.mark.parametrize("builds", ["ab", "abc"])
def test_every_other_block_of_a_depth_is_the_mirror_image_of_the_one_before(builds: str) -> None:
    for launch in range(4):
        blocks = blocks_of(launch_schedule(list(builds), [64, 128], 16, launch, seed=3)).values()
        for depth in (64, 128):
            orders = ["".join(slot.build for slot in block) for block in blocks if block[0].depth == depth]
            first = [order[: len(builds)] for order in orders]
            assert len(first) == 8
            assert all(second == one[::-1] for one, second in zip(first[::2], first[1::2], strict=True))


def test_warm_ups_take_turns_and_end_as_even_as_their_number_allows() -> None:
    requests = [(64, "w0"), (64, "w1"), (128, "w2"), (128, "w3")]
    slots = warmup_schedule(["b", "a"], requests, block=-1)
    assert "".join(slot.build for slot in slots) == "baabbaab"
    assert [slot.request_id for slot in slots] == ["w0", "w0", "w1", "w1", "w2", "w2", "w3", "w3"]
    assert [slot.order for slot in slots] == list(range(8))
    assert {slot.block for slot in slots} == {-1}
    mean = {build: sum(slot.order for slot in slots if slot.build == build) / 4 for build in "ab"}
    assert mean["a"] == mean["b"]


def test_the_order_depends_on_seed_and_launch_only() -> None:
    make = lambda seed, launch: launch_schedule(["a", "b"], [64, 128], 16, launch, seed)  # noqa: E731
    assert make(1, 0) == make(1, 0)
    assert [s.build for s in make(1, 0)] != [s.build for s in make(2, 0)] or make(1, 0)[0].depth != make(2, 0)[0].depth
    assert [s.build for s in make(1, 0)] != [s.build for s in make(1, 1)]


def test_engines_start_in_turned_order_from_launch_to_launch() -> None:
    assert [launch_order(["a", "b"], n) for n in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert [launch_order(["a"], n) for n in range(2)] == [["a"], ["a"]]


def test_a_control_is_always_started_between_the_two() -> None:
    assert [launch_order(["a", "b", "control"], n) for n in range(2)] == [["a", "control", "b"], ["b", "control", "a"]]
