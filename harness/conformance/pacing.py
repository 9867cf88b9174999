"""Waiting for an absolute time: sleep while it is far, spin when it is near."""

from time import perf_counter_ns, sleep

SPIN_NS = 300_000  # a sleeping process wakes up to this late


def wait_until(due_ns: int) -> int:
    """Returns perf_counter_ns at or just after due_ns; at once where that has passed."""
    while True:
        now_ns = perf_counter_ns()
        left_ns = due_ns - now_ns
        if left_ns <= 0:
            return now_ns
        if left_ns > SPIN_NS:
            sleep((left_ns - SPIN_NS) / 1e9)
