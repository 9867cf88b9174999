"""Engines that are resident together share the machine: one may still be at work when its stream has ended.

A server's worker threads can spin for 200 ms and more after the last token (OpenMP runtimes do). On two cores that
doubled the next engine's time to first token, so a stream begins only once the others are idle. One that never is, or
that goes to work again while its neighbour answers, is named in the stream that it may have slowed.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import psutil

WINDOW_S = 0.02
IDLE_SHARE = 0.1  # of one CPU, over a window
LIMIT_S = 1.0  # an engine that is never idle delays every stream by this, no more
NS_PER_S = 1e9


class Neighbours:
    """The engines beside the one that is measured, by build; all they used of the processor around one stream."""

    def __init__(self, pids: Mapping[str, Iterable[int]]) -> None:
        self._pids = {name: list(own) for name, own in pids.items()}
        self._never_idle: tuple[str, ...] = ()
        self._mark()

    def wait(self, limit_s: float = LIMIT_S) -> "Neighbours":
        """Returns once all are idle together, or at the limit; the stream begins now."""
        pids = [pid for own in self._pids.values() for pid in own]
        if pids and not wait_until_idle(partial(busy_s, pids), limit_s):
            busy = (name for name, own in self._pids.items() if not wait_until_idle(partial(busy_s, own), limit_s=0))
            self._never_idle = tuple(busy) or tuple(self._pids)
        self._mark()
        return self

    def busy(self) -> tuple[str, ...]:
        """Those still at work when the stream began, or that used IDLE_SHARE of a CPU or more since."""
        elapsed_s = monotonic() - self._began_s
        used_s = {name: busy_s(own) - self._before_s[name] for name, own in self._pids.items()}
        return tuple(name for name in self._pids if name in self._never_idle or used_s[name] >= IDLE_SHARE * elapsed_s)

    def _mark(self) -> None:
        self._before_s = {name: busy_s(own) for name, own in self._pids.items()}
        self._began_s = monotonic()


def busy_s(pids: Iterable[int]) -> float:
    """CPU seconds that these processes' threads have used so far; what is gone no longer counts."""
    return sum(_busy_s(pid) for pid in pids)


def wait_until_idle(used_s: Callable[[], float], limit_s: float = LIMIT_S) -> bool:
    """Returns once `used_s` grows by less than IDLE_SHARE of a CPU over a window: True; after the limit: False."""
    deadline = monotonic() + limit_s
    before, before_s = used_s(), monotonic()
    while True:
        sleep(WINDOW_S)
        after, now_s = used_s(), monotonic()
        if 0 <= after - before < IDLE_SHARE * (now_s - before_s):
            return True
        if now_s > deadline:
            return False
        before, before_s = after, now_s


def _busy_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task")
    try:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / NS_PER_S
    except (OSError, ValueError, IndexError):  # it has ended, or this system keeps no such account
        pass
    try:
        times = psutil.Process(pid).cpu_times()  # in ticks of 10 ms
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
