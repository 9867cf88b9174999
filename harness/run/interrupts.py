"""Interrupts: SIGTERM and SIGHUP are handled like Ctrl-C, and none of the three takes effect inside a write."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into KeyboardInterrupt inside the block."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_after() -> Iterator[None]:
    """An interrupt that comes inside the block takes effect when the block has ended, once, by the handler it had.

    Python runs signal handlers on the main thread alone, so on any other this does nothing. A signal whose handler is
    not Python's (the default that ends the process, or ignored) is left as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    delay = _Delay()
    try:
        delay.begin()
        yield
    finally:
        delay.end()


class _Delay:
    """Handlers that remember a signal while they are active, and pass it on from then on.

    They pass it on so that an interrupt between the restoring of two handlers, which leaves one of them in place, is
    not the last that this process ever hears.
    """

    def __init__(self) -> None:
        handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
        self._before = {number: handler for number, handler in handlers.items() if callable(handler)}
        self._is_active = True
        self._came: list[int] = []

    def begin(self) -> None:
        for number in self._before:
            signal.signal(number, self._handle)

    def end(self) -> None:
        self._is_active = False
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._came:
            self._before[signal.Signals(self._came[0])](self._came[0], None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_active:
            self._came.append(number)
        else:
            self._before[signal.Signals(number)](number, frame)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
