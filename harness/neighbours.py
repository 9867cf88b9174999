"""Engines that are resident together share the machine: one may still be at work when its stream has ended.

A server's worker threads can spin for 200 ms and more after the last token (OpenMP runtimes do). On two cores that
doubled the next engine's time to first token, so a stream begins only once the others are idle.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic, sleep

import psutil

WINDOW_S = 0.02
IDLE_SHARE = 0.1  # of one CPU, over a window
LIMIT_S = 1.0  # an engine that is never idle delays every stream by this, no more
NS_PER_S = 1e9


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
