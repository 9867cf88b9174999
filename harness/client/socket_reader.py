"""Bytes off a socket, each piece with the time at which it arrived.

Linux stamps every TCP segment as it takes it in (SO_TIMESTAMPNS), and a read gives the stamp of the segment that holds
its last byte. What waits is therefore looked at first (MSG_PEEK) and then taken event by event, so that each event gets
the stamp of the segment that completed it, however late this process woke up. The limit: when several events wait, TCP
may join their segments, and they share the last one's stamp, which is still no later than this process's own. So the
last token's time is exact, and tokens joined with the first are left out of the time per token.
Where there are no such stamps (TLS, other systems) the process's own clock right after the read has to do.
"""

import re
from collections.abc import Callable
from socket import IPPROTO_TCP, MSG_PEEK, SO_RCVTIMEO
from socket import socket as Socket
from time import perf_counter_ns
from typing import Protocol

from .timestamps import STAMP_BYTES, Arrival, sent_stamp_ns, set_kernel_timeout

RECV_BYTES = 65_536
GUARDED_READS = 20
TCP_QUICKACK = 12  # linux/tcp.h; `socket` names it on Linux only, where alone KernelStamped is used

_EVENT_END = re.compile(rb"\n\r?\n|\r\r")
_NOTHING_MORE = (b"", b"\r\n")  # the end of an HTTP chunk may follow that of an event


class Arrivals(Protocol):
    """Where the bytes of an answer come from."""

    def settimeout(self, seconds: float) -> None:
        """How long one `receive` may wait."""

    def receive(self, kept: list[Arrival]) -> bytes:
        """Waits for bytes, appends them to `kept` and returns them; b"" where the connection ended.

        Raises TimeoutError after the timeout and OSError where the connection broke.
        """

    def tokens_begin(self) -> None:
        """The first token is in."""

    def sent_stamp_ns(self) -> int | None:
        """CLOCK_REALTIME in ns when the request's last byte left this machine; None where the kernel does not say."""


class KernelStamped:
    """Arrivals on a plain TCP socket, taken event by event. Two system calls a step.

    Acknowledgements matter twice. A server without TCP_NODELAY waits for them, so each read sends its own. But segments
    that were acknowledged while they wait are joined into one, with the last one's stamp for all, and TCP acknowledges
    the first 16 segments after a pause at once: for so many reads it is told to wait with that for a read.
    """

    def __init__(self, connection: Socket) -> None:
        connection.settimeout(None)  # the kernel's own timeout saves a poll before every read
        self._connection = connection
        self._recv: Callable[[int], bytes] = connection.recv
        self._recvmsg = connection.recvmsg
        self._sent_stamp_ns: int | None = None
        self._have_begun = False
        self._reads_to_guard = GUARDED_READS
        self.sent_stamp_ns()
        connection.setsockopt(IPPROTO_TCP, TCP_QUICKACK, 0)

    def settimeout(self, seconds: float) -> None:
        """See Arrivals."""
        set_kernel_timeout(self._connection, SO_RCVTIMEO, seconds)

    def receive(self, kept: list[Arrival]) -> bytes:
        """See Arrivals."""
        try:
            seen, stamp, _, _ = self._recvmsg(RECV_BYTES, STAMP_BYTES, MSG_PEEK)
            t_ns = perf_counter_ns()
            if _holds_several(seen):
                self._take_each(seen, t_ns, kept)
            else:
                kept.append((t_ns, stamp, self._recv(len(seen)) if seen else b""))
            if self._reads_to_guard:
                self._acknowledge()
            return seen
        except BlockingIOError:
            raise TimeoutError from None

    def tokens_begin(self) -> None:
        """See Arrivals."""
        self.sent_stamp_ns()  # a network card tells it a little after the sending
        self._have_begun = True

    def _acknowledge(self) -> None:
        """Now, and until enough tokens are in, not again before the next read."""
        self._connection.setsockopt(IPPROTO_TCP, TCP_QUICKACK, 1)
        self._reads_to_guard -= self._have_begun
        if self._reads_to_guard:
            self._connection.setsockopt(IPPROTO_TCP, TCP_QUICKACK, 0)

    def sent_stamp_ns(self) -> int | None:
        """See Arrivals. A stamp that nobody takes counts as unread bytes, and reads then acknowledge 40 ms late."""
        self._sent_stamp_ns = sent_stamp_ns(self._connection) or self._sent_stamp_ns
        return self._sent_stamp_ns

    def _take_each(self, seen: bytes, t_ns: int, kept: list[Arrival]) -> None:
        """Reads up to the end of each event that waits, and then the rest."""
        at = 0
        ends = [end.end() for end in _EVENT_END.finditer(seen)]
        for end in ends if ends[-1] == len(seen) else (*ends, len(seen)):
            piece, stamp, _, _ = self._recvmsg(end - at, STAMP_BYTES)
            kept.append((t_ns, stamp, piece))
            at = end


def _holds_several(seen: bytes) -> bool:
    """Whether bytes follow the end of an event. Plain searches first: they take a tenth of the expression's time."""
    end = seen.find(b"\n\n")
    if end >= 0 and seen.find(b"\n\r\n", 0, end) < 0 and seen.find(b"\r\r", 0, end) < 0:
        return seen[end + 2 :] not in _NOTHING_MORE
    first_end = _EVENT_END.search(seen)
    return first_end is not None and seen[first_end.end() :] not in _NOTHING_MORE


class ProcessStamped:
    """Arrivals on any socket, stamped after each read."""

    def __init__(self, connection: Socket) -> None:
        self._recv: Callable[[int], bytes] = connection.recv
        self.settimeout = connection.settimeout

    def receive(self, kept: list[Arrival]) -> bytes:
        """See Arrivals."""
        piece = self._recv(RECV_BYTES)
        kept.append((perf_counter_ns(), (), piece))
        return piece

    def tokens_begin(self) -> None:
        """See Arrivals."""

    def sent_stamp_ns(self) -> int | None:
        """See Arrivals."""
        return None
