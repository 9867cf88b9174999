"""When bytes came: by the kernel's stamps event by event, by the process's clock where those do not hold."""

import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from socket import SOL_SOCKET
from time import perf_counter_ns
from typing import ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernarc.harness.client.checks import lateness_problem
from kernarc.harness.client.client import StreamingClient
from kernarc.harness.client.completion import StreamOutcome
from kernarc.harness.client.socket_reader import KernelStamped, ProcessStamped
from kernarc.harness.client.timestamps import (
    MAX_DOUBT_NS,
    STAMP_BYTES,
    Arrival,
    StampedBy,
    ask_for_stamps,
    send_stamped,
    sent_stamp_ns,
    settle,
    stamp_ns,
    wall_offset_ns,
)
from kernarc.harness.run.records import StreamStatus, TokenEvent
from kernarc.harness.selftest.checks import case_row
from kernarc.harness.selftest.conformance.cases import CASES
from kernarc.harness.selftest.conformance.process import ConformanceServer
from kernarc.harness.selftest.play import play

OFFSET_NS = 1_800_000_000_000_000_000
EVENTS = [b"data: %d\n\n" % number for number in range(8)]


def kernel_message(wall_ns: int) -> list[tuple[int, int, bytes]]:
    return [(SOL_SOCKET, 35, struct.pack("=qq", *divmod(wall_ns, 1_000_000_000)))]


def arrivals(*times: tuple[int, int | None]) -> list[Arrival]:
    """Of (perf_counter_ns after the read, perf_counter_ns of the kernel's stamp or None)."""
    return [(read, [] if stamp is None else kernel_message(OFFSET_NS + stamp), b"x") for read, stamp in times]


def test_the_kernel_says_when_and_the_reads_say_how_late_this_process_was() -> None:
    stamps = settle(arrivals((1_000, 900), (5_000, 2_000), (5_000, 3_000)), OFFSET_NS, OFFSET_NS)
    assert stamps.times_ns == (900, 2_000, 3_000)
    assert (stamps.stamped_by, stamps.lags_ns) == (StampedBy.KERNEL, (100, 3_000, 2_000))


@pytest.mark.parametrize(
    ("times", "offset_after_ns"),
    [
        ([(1_000, 900), (2_000, None)], OFFSET_NS),
        ([(1_000, 1_001 + MAX_DOUBT_NS), (2_000, 2_001 + MAX_DOUBT_NS)], OFFSET_NS),
        ([(1_000, 900), (2_000, 1_900)], OFFSET_NS + MAX_DOUBT_NS + 1),
    ],
    ids=["a stamp is missing", "stamps from after their reads", "somebody set the clock"],
)
def test_one_doubt_and_the_process_stamps_the_whole_stream(
    times: list[tuple[int, int | None]], offset_after_ns: int
) -> None:
    stamps = settle(arrivals(*times), OFFSET_NS, offset_after_ns)
    assert (stamps.times_ns, stamps.stamped_by, stamps.lags_ns) == ((1_000, 2_000), StampedBy.PROCESS, ())


def test_bytes_that_another_segment_joined_came_no_later_than_they_were_seen() -> None:
    stamps = settle(arrivals((1_000, 900), (2_000, 9_000_000), (9_100_000, 9_000_000)), OFFSET_NS, OFFSET_NS)
    assert stamps.times_ns == (900, 2_000, 9_000_000)


def test_a_segment_that_overtook_another_counts_when_the_other_is_there() -> None:
    assert settle(arrivals((9_000, 5_000), (9_000, 4_000)), OFFSET_NS, OFFSET_NS).times_ns == (5_000, 5_000)


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with client, server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not ask_for_stamps(client):
                pytest.skip("this system stamps no arrivals")
            for _ in range(1000):  # it begins a little later
                server.sendall(b"?")
                if stamp_ns(client.recvmsg(1, STAMP_BYTES)[1]) is not None:
                    break
                time.sleep(0.01)
            yield client, server


@pytest.mark.parametrize("earlier_events", [0, 1, 10, 19, 40])
def test_events_that_waited_for_a_late_reader_have_their_own_times(
    earlier_events: int,
    connected: tuple[socket.socket, socket.socket],
) -> None:
    client, server = connected
    source = KernelStamped(client)
    for _ in range(earlier_events):
        server.sendall(b"data: earlier\n\n")
        source.receive([])
        source.tokens_begin()
    written_ns = []
    for event in EVENTS:
        written_ns.append(perf_counter_ns())
        server.sendall(event)
    written_ns.append(perf_counter_ns())
    time.sleep(0.1)  # nobody read anything until now
    kept: list[Arrival] = []
    offset_ns = wall_offset_ns()
    assert source.receive(kept) == b"".join(EVENTS)
    stamps = settle(kept, offset_ns, wall_offset_ns())
    assert [piece for *_, piece in kept] == EVENTS
    assert stamps.stamped_by is StampedBy.KERNEL
    for (earliest, latest), stamp in zip(pairwise(written_ns), stamps.times_ns, strict=True):
        assert earliest - MAX_DOUBT_NS <= stamp <= latest + MAX_DOUBT_NS
    assert min(stamps.lags_ns) > 50_000_000


def test_the_request_left_between_its_sending_and_its_arrival(connected: tuple[socket.socket, socket.socket]) -> None:
    client, server = connected
    request = b"x" * 1_000_000
    offset_ns, before_ns = wall_offset_ns(), perf_counter_ns()

    def read_all() -> None:
        left = len(request)
        while left:
            left -= len(server.recv(65_536))

    reader = threading.Thread(target=read_all)
    reader.start()
    assert send_stamped(client, request, 10.0) == len(request)
    reader.join()
    arrived_ns = perf_counter_ns()
    left_ns = sent_stamp_ns(client)
    assert left_ns is not None
    assert before_ns - MAX_DOUBT_NS <= left_ns - offset_ns <= arrived_ns + MAX_DOUBT_NS
    assert sent_stamp_ns(client) is None  # a queue that is not empty would wake every later wait


def test_a_kernel_that_stamps_no_sending_sends_all_the_same() -> None:
    class Emulated:
        """A socket that knows no such control message."""

        sent: ClassVar[list[bytes]] = []

        def settimeout(self, seconds: float | None) -> None: ...
        def setsockopt(self, *_: object) -> None: ...
        def sendmsg(self, *_: object) -> int:
            raise OSError(errno.EINVAL, "Invalid argument")

        def send(self, data: bytes) -> int:
            self.sent.append(data)
            return len(data)

    assert send_stamped(cast("socket.socket", Emulated()), b"request", 1.0) == 7
    assert Emulated.sent == [b"request"]


@pytest.mark.parametrize("kind", [KernelStamped, ProcessStamped])
def test_silence_the_end_and_a_reset(
    kind: type[KernelStamped] | type[ProcessStamped], connected: tuple[socket.socket, socket.socket]
) -> None:
    client, server = connected
    source = kind(client)
    source.settimeout(0.02)
    with pytest.raises(TimeoutError):
        source.receive([])
    kept: list[Arrival] = []
    server.sendall(b"last")
    server.shutdown(socket.SHUT_WR)
    source.settimeout(10.0)
    assert [source.receive(kept), source.receive(kept)] == [b"last", b""]
    server.setsockopt(SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.close()
    with pytest.raises(OSError, match=r"pipe|reset"):
        client.sendall(b"x")


@given(st.lists(st.sampled_from([b"data: a\n\n", b"data: b\r\n\r\n", b"data: c\r\r", b": d\n", b"e"]), max_size=12))
def test_taking_events_one_by_one_loses_no_byte(events: list[bytes]) -> None:
    """However events end: what is kept is what was sent, and no kept piece goes on after an event's end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        theirs.sendall(b"".join(events))
        theirs.shutdown(socket.SHUT_WR)
        source, kept = KernelStamped(ours), list[Arrival]()
        while source.receive(kept):
            pass
    pieces = [piece for *_, piece in kept]
    assert b"".join(pieces) == b"".join(events)
    for piece in pieces:
        before_its_end = piece.removesuffix(b"\r\n").rstrip(b"\r\n").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        assert b"\n\n" not in before_its_end


@pytest.mark.parametrize("name", ["mixed-steps", "crlf", "content-length", "close-mid-stream", "stall-with-pings"])
def test_without_stamps_of_the_kernel_the_process_stamps(
    name: str, conformance_server: ConformanceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernarc.harness.client.client.lateness_problem", lambda events, waited_ns: None)
    case = CASES[name]
    played = play(conformance_server, case, 1, StampedBy.PROCESS)
    assert played.outcomes[-1].stamped_by is StampedBy.PROCESS
    row = case_row(case, played, 1)
    assert row.passed or row.missed_by_time_alone, row.mismatches


def test_a_process_that_had_no_processor_voids_the_stream_that_it_stamped(
    conformance_server: ConformanceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter([0, 50_000_000, 0, 50_000_000])
    monkeypatch.setattr("kernarc.harness.client.client.run_queue_wait_ns", lambda: next(waits))
    assert complete(conformance_server).status is StreamStatus.OK  # the kernel stamped it
    outcome = complete(conformance_server, StampedBy.PROCESS)
    assert outcome.status is StreamStatus.VOID
    assert "waited 50.0 ms for a processor" in (outcome.void_reason or "")


def complete(server: ConformanceServer, stamped_by: StampedBy = StampedBy.KERNEL) -> StreamOutcome:
    played = play(server, CASES["two-tokens"], 1, stamped_by)
    return played.outcomes[-1]


def test_a_wait_of_two_per_cent_is_told_apart() -> None:
    events = [TokenEvent(t_ns=0, token_ids=(1,)), TokenEvent(t_ns=1_000_000_000, token_ids=(2,))]
    assert lateness_problem(events, 20_000_000) is None
    assert lateness_problem(events, 20_000_001) is not None
    assert lateness_problem((), 1_000_000) is None


def test_the_time_to_the_first_token_is_never_negative(conformance_server: ConformanceServer) -> None:
    """Even where the answer is there before this process runs again: both ends are stamped by the kernel."""
    with StreamingClient(conformance_server.url("two-tokens")) as client:
        assert client.ask("/tokenize", {"prompt": "a b"}) is not None
    outcome = complete(conformance_server)
    assert outcome.stamped_by is StampedBy.KERNEL
    assert outcome.sent_ns < outcome.events[0].t_ns
