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
    """Blocks of two requests at one depth: A B on the first, B A on the second; every other block is dealt anew.

    The block after it is its mirror image, B A and A B: in ABBA it is B that answers twice in a row, and the second
    time finds its own weights in the caches, so that has to meet every build as often. With an odd number of requests
    the last block of a depth holds one. The same arguments give the same order.
    """
    rng = random.Random(f"{seed}:{launch}")
    slots: list[Slot] = []
    block = 0
    dealt: dict[int, list[str]] = {}  # the last block's order at each depth whose mirror image is due
    for first in range(0, requests_per_depth, 2):
        for depth in _shuffled(depths, rng):
            mirror = dealt.pop(depth, None)
            order = mirror[::-1] if mirror is not None else dealt.setdefault(depth, _shuffled(builds, rng))
            for number in range(first, min(first + 2, requests_per_depth)):
                request_id = f"d{depth}-l{launch}-r{number}"
                slots += [Slot(len(slots) + n, block, build, depth, request_id) for n, build in enumerate(order)]
                order = order[::-1]
            block += 1
    return slots


def launch_order(builds: Sequence[str], launch: int) -> list[str]:
    """The order in which engines start: turned round with every launch.

    The first two are outermost, so that a third, a gate's control, is always started between them: what its place does
    is then the same in every launch, and no drift.
    """
    first, rest = list(builds[:1]), list(builds[1:])
    order = [*first, *rest[1:], *rest[:1]]
    return order if launch % 2 == 0 else order[::-1]


def warmup_schedule(builds: Sequence[str], requests: Sequence[tuple[int, str]], block: int) -> list[Slot]:
    """Every build answers every warm-up request (depth, request_id): A B on the first, B A on the second, and so on.

    builds: in their start order. No engine rests while all of another's warm-ups run, and over an even number of
    requests all are on average equally long ago; what an odd one leaves turns round with the start order.
    """
    slots: list[Slot] = []
    for number, (depth, request_id) in enumerate(requests):
        for build in builds if number % 2 == 0 else reversed(builds):
            slots.append(Slot(len(slots), block, build, depth, request_id))
    return slots


def _shuffled(items: Sequence[T], rng: random.Random) -> list[T]:
    keyed = sorted((rng.random(), index) for index in range(len(items)))
    return [items[index] for _, index in keyed]
