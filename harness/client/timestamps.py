"""Linux's own stamps of what a TCP socket sends and receives (SO_TIMESTAMPNS, SO_TIMESTAMPING), on CLOCK_REALTIME, and
the same on the clock that everything else is timed with; or the process's own, where they do not hold."""

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from errno import EINVAL, EOPNOTSUPP, EPERM
from functools import cache
from pathlib import Path
from platform import machine
from socket import AF_INET, CMSG_SPACE, MSG_DONTWAIT, SO_SNDTIMEO, SOCK_DGRAM, SOL_SOCKET
from socket import socket as Socket
from time import CLOCK_REALTIME, clock_gettime_ns, perf_counter_ns

Ancillary = Sequence[tuple[int, int, bytes]]  # level, type and data of a read's control messages
Arrival = tuple[int, Ancillary, bytes]  # perf_counter_ns right after the read, what the kernel says of it, the bytes

MAX_DOUBT_NS = 20_000  # how far the two clocks may seem to move apart in a stream, and a stamp lie after its read
_TRIES = 5
_RUN_QUEUE = Path("/proc/thread-self/schedstat")

_SO_TIMESTAMPNS = 35  # asm-generic/socket.h, also the type of the message with the stamp; `socket` does not name them
_SO_TIMESTAMPING = 37
_MSG_ERRQUEUE = 0x2000
_TX_SOFTWARE = struct.pack("=I", 1 << 1)  # SOF_TIMESTAMPING_TX_SOFTWARE: stamp the last byte as it is handed over
_TIMESPEC = struct.Struct("=qq")
_STAMPING_MACHINES = ("x86_64", "aarch64", "riscv64")  # of those that use asm-generic's numbers and 64-bit times
_STAMP_REFUSALS = (EINVAL, EOPNOTSUPP, EPERM)
_ERROR_BYTES = 256  # a stamp in the error queue comes with more than itself
STAMP_BYTES = CMSG_SPACE(_TIMESPEC.size)


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


@cache
def keep_stamping() -> Socket | None:
    """The kernel stamps nothing until somebody wants it, and begins and ends a little after that: one socket that wants
    it as long as this process lives. None where there are no stamps."""
    if sys.platform != "linux" or machine() not in _STAMPING_MACHINES:
        return None
    keeper = Socket(AF_INET, SOCK_DGRAM)
    try:
        keeper.setsockopt(SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        keeper.close()
        return None
    return keeper


def ask_for_stamps(connection: Socket) -> bool:
    """Has the kernel stamp what arrives here from now on; returns whether it will. Ask as soon as it is connected."""
    if keep_stamping() is None:
        return False
    connection.setsockopt(SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return True


def set_kernel_timeout(connection: Socket, option: int, seconds: float) -> None:
    """SO_RCVTIMEO or SO_SNDTIMEO of a socket in blocking mode, which saves the poll that settimeout() costs a call."""
    timeval = divmod(max(1, round(seconds * 1e6)), 1_000_000)
    connection.setsockopt(SOL_SOCKET, option, struct.pack("@ll", *timeval))


def send_stamped(connection: Socket, data: bytes | memoryview, timeout_s: float) -> int:
    """Returns how many bytes were taken, all unless something went wrong then; sent_stamp_ns says when they went out.

    Raises OSError where not even one was, a TimeoutError after the timeout. Leaves the socket in blocking mode.
    """
    connection.settimeout(None)
    set_kernel_timeout(connection, SO_SNDTIMEO, timeout_s)
    try:
        return connection.sendmsg([data], [(SOL_SOCKET, _SO_TIMESTAMPING, _TX_SOFTWARE)])
    except BlockingIOError:
        raise TimeoutError(f"nothing was taken for {timeout_s:g} s") from None
    except OSError as error:
        if error.errno not in _STAMP_REFUSALS:
            raise
        return connection.send(data)  # an emulated kernel, which stamps no sending


def sent_stamp_ns(connection: Socket) -> int | None:
    """CLOCK_REALTIME in ns at which the last byte sent with a stamp left TCP; None where the kernel does not say."""
    latest_ns = None
    flags = _MSG_ERRQUEUE
    while flags & _MSG_ERRQUEUE:
        try:
            _, ancillary, flags, _ = connection.recvmsg(1, _ERROR_BYTES, _MSG_ERRQUEUE | MSG_DONTWAIT)
        except OSError:  # there are no more
            break
        latest_ns = stamp_ns(ancillary) or latest_ns
    return latest_ns


def stamp_ns(ancillary: Ancillary) -> int | None:
    """CLOCK_REALTIME in ns by a read's control messages: of the segment with its last byte. None without one."""
    for level, kind, data in ancillary:
        if level == SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _TIMESPEC.size:
            seconds, ns = _TIMESPEC.unpack(data)
            return int(seconds) * 1_000_000_000 + int(ns)
    return None
