"""A polite end asked for by the system is handled like Ctrl-C: keep what was measured, stop the engines."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into KeyboardInterrupt inside the block."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
