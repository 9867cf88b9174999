"""The order of a launch: seeded ABBA blocks, every depth in every round, so that drift meets all builds alike."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Slot:
    """One stream to be: which build answers which request, in which block; order counts from 0 in the launch."""

    order: int
    block: int
    build: str
    depth: int
    request_id: str


def launch_schedule(
    builds: Sequence[str], depths: Sequence[int], requests_per_depth: int, launch: int, seed: int
) -> list[Slot]:
    """Blocks of two requests at one depth: A B on the first, B A on the second, A and B dealt anew for every block.

    With an odd number of requests the last block of a depth holds one. The same arguments give the same order.
    """
    rng = random.Random(f"{seed}:{launch}")
    slots: list[Slot] = []
    block = 0
    for first in range(0, requests_per_depth, 2):
        for depth in _shuffled(depths, rng):
            order = _shuffled(builds, rng)
            for number in range(first, min(first + 2, requests_per_depth)):
                request_id = f"d{depth}-l{launch}-r{number}"
                slots += [Slot(len(slots) + n, block, build, depth, request_id) for n, build in enumerate(order)]
                order = order[::-1]
            block += 1
    return slots


def launch_order(builds: Sequence[str], launch: int) -> list[str]:
    """The order in which engines start: turned round with every launch."""
    return list(builds) if launch % 2 == 0 else list(builds)[::-1]


def _shuffled(items: Sequence[T], rng: random.Random) -> list[T]:
    keyed = sorted((rng.random(), index) for index in range(len(items)))
    return [items[index] for _, index in keyed]
