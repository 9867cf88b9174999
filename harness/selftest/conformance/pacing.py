"""Waiting for an absolute time: sleep while it is far, spin when it is near, and be let run when it comes."""

import ctypes
import os
import sys
from contextlib import suppress
from time import perf_counter_ns, sleep

_IS_ALONE = (os.cpu_count() or 1) < 2
SPIN_NS = (
    300_000 if _IS_ALONE else 1_500_000
)  # a sleeping process wakes up to this late; alone, the client needs the CPU
PRIORITY = -10  # where it may be raised
_PR_SET_TIMERSLACK = 29


def be_punctual() -> None:
    """Raises this process's priority where that is allowed, and has its timers end when they are due (Linux)."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)  # ns; later threads inherit it


def wait_until(due_ns: int) -> int:
    """Returns perf_counter_ns at or just after due_ns; at once where that has passed."""
    while True:
        now_ns = perf_counter_ns()
        left_ns = due_ns - now_ns
        if left_ns <= 0:
            return now_ns
        if left_ns > SPIN_NS:
            sleep((left_ns - SPIN_NS) / 1e9)
