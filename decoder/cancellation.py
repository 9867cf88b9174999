"""How a long prefill learns that nobody waits for it any more: the caller's thread says so, each piece asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .errors import DecoderError

_is_cancelled: ContextVar[Callable[[], bool] | None] = ContextVar("is_cancelled", default=None)


class CancelledError(DecoderError):
    """The work was given up on request, between two pieces of it."""


@contextmanager
def cancellable(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Within it, in this thread, raise_if_cancelled() asks `is_cancelled`."""
    token = _is_cancelled.set(is_cancelled)
    try:
        yield
    finally:
        _is_cancelled.reset(token)


def raise_if_cancelled() -> None:
    """Called between pieces of a prefill. Raises CancelledError."""
    is_cancelled = _is_cancelled.get()
    if is_cancelled is not None and is_cancelled():
        raise CancelledError("the request was cancelled")
