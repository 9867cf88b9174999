"""The kernel's stamps on the clock that everything else is timed with, or the process's own where they do not hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import CLOCK_REALTIME, clock_gettime_ns, perf_counter_ns

from .kernel_timestamps import stamp_ns
from .socket_reader import Arrival

MAX_DOUBT_NS = 20_000  # how far the two clocks may seem to move apart in a stream, and a stamp lie after its read
_TRIES = 5
_RUN_QUEUE = Path("/proc/thread-self/schedstat")


class StampedBy(StrEnum):
    """Whose clock the times of a stream are from."""

    KERNEL = "kernel"  # when the segment that completed the event reached this machine's TCP
    PROCESS = "process"  # when this process had read it


@dataclass(frozen=True)
class Stamps:
    """When each arrival came (perf_counter_ns), by whose clock, and how much later this process had read it (ns)."""

    times_ns: tuple[int, ...]
    stamped_by: StampedBy
    lags_ns: tuple[int, ...] = ()


def wall_offset_ns() -> int:
    """CLOCK_REALTIME − perf_counter, to about 0.1 µs. It stays the same unless somebody sets the clock: both are slewed
    alike."""
    best_ns, offset_ns = None, 0
    for _ in range(_TRIES):
        before_ns = perf_counter_ns()
        wall_ns = clock_gettime_ns(CLOCK_REALTIME)
        took_ns = perf_counter_ns() - before_ns
        if best_ns is None or took_ns < best_ns:
            best_ns, offset_ns = took_ns, wall_ns - before_ns - took_ns // 2
    return offset_ns


def settle(arrivals: Sequence[Arrival], offset_before_ns: int, offset_after_ns: int) -> Stamps:
    """The times of a stream's arrivals in order, all of them by one clock.

    The kernel's, if every arrival has a stamp, most lie before the read, and nobody set the clock in between. (Waiting
    segments are joined, the last one's stamp for all: one that joins in the middle of a read stamps bytes already seen,
    which came no later than that.) Bytes wait for those before them: a segment that overtook another counts when the
    other is there.
    """
    read_ns = tuple(arrival[0] for arrival in arrivals)
    if abs(offset_after_ns - offset_before_ns) > MAX_DOUBT_NS:
        return Stamps(read_ns, StampedBy.PROCESS)
    times_ns: list[int] = []
    latest_ns = late = 0
    for t_ns, ancillary, _ in arrivals:
        wall_ns = stamp_ns(ancillary)
        if wall_ns is None:
            return Stamps(read_ns, StampedBy.PROCESS)
        late += wall_ns - offset_before_ns > t_ns + MAX_DOUBT_NS
        latest_ns = max(latest_ns, min(t_ns, wall_ns - offset_before_ns))
        times_ns.append(latest_ns)
    if late > len(times_ns) / 2:
        return Stamps(read_ns, StampedBy.PROCESS)
    lags_ns = tuple(t_ns - arrived_ns for t_ns, arrived_ns in zip(read_ns, times_ns, strict=True))
    return Stamps(tuple(times_ns), StampedBy.KERNEL, lags_ns)


def run_queue_wait_ns() -> int:
    """How long this thread has been ready to run without a processor since it began; 0 where nobody counts."""
    try:
        return int(_RUN_QUEUE.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
