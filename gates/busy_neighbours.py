"""Streams measured while another engine was using the processor were slowed by it, not by their own build.

A server that busy-polls while it waits takes a core from whoever is measured next to it: on two cores that reads as a
baseline 70 % slower and a candidate that IMPROVED. `residency: alternate` takes the neighbour away.
"""

import math
from collections import Counter
from collections.abc import Sequence

from ..harness.run.records import StreamRecord
from .outcomes import Crowding

# Sharing a core doubles a stream's time at most, about, so a share s of crowded streams moves a depth's mean log ratio
# by up to s·ln 2: 1.4 % at 2 %. Scattered like stragglers they also add sd(d) = ln 2·√(s(1 − s)) to the noise, and the
# interval, t·sd(d)/√n, grows by as much as they move it: by 2.7 % at 5 launches of 20 pairs, by 1.4 % at 12.
MAX_BUSY_NEIGHBOUR_SHARE = 0.02


def builds_beside_busy(
    streams: Sequence[StreamRecord],
    builds: Sequence[str],
    *,
    launches: int,
    planned_a_depth: int,
    void_blocks: frozenset[tuple[int, int]] = frozenset(),
) -> tuple[Crowding, ...]:
    """The builds with more crowded streams at some depth than may be, by all their streams of the first `launches`.

    planned_a_depth: streams of a build at one depth by the next decision; MAX_BUSY_NEIGHBOUR_SHARE of them may be
    crowded, and one always. void_blocks: (launch, block) that count neither way.
    """
    allowed = max(1, math.floor(MAX_BUSY_NEIGHBOUR_SHARE * planned_a_depth))
    found = []
    for build in builds:
        counted = [
            stream
            for stream in streams
            if stream.build == build
            and not stream.is_warmup
            and stream.launch < launches
            and (stream.launch, stream.block) not in void_blocks
        ]
        crowded = [stream for stream in counted if stream.busy_neighbours]
        if max(Counter(stream.depth for stream in crowded).values(), default=0) > allowed:
            busy = tuple(sorted({name for stream in crowded for name in stream.busy_neighbours}))
            found.append(Crowding(build=build, streams=len(counted), crowded=len(crowded), busy=busy))
    return tuple(found)


def busy_neighbour_reason(crowding: Crowding) -> str:
    """Why a comparison with these streams is void."""
    busy = " and ".join(crowding.busy)
    return (
        f"{crowding.crowded:,} of {crowding.streams:,} streams of {crowding.build} were measured while the engine "
        f"of {busy} was using the processor"
    )
