"""Reading one answer off the socket: stamped first, parsed later, given up at its limits.

After the first token the bytes are only taken and kept; HTTP framing and JSON wait until the stream has ended, so that
a 64K-token prompt or 5,000 events a second cannot keep this process from the next read.
"""

import re
from dataclasses import dataclass, field
from time import perf_counter_ns

from ..config.models import LimitsConfig
from .http import HttpFramingError, ResponseReader
from .socket_reader import Arrivals
from .timestamps import Arrival, StampedBy, settle, wall_offset_ns

NS_PER_S = 1_000_000_000
AFTER_DONE_S = 1.0  # how long the body may stay open after [DONE]
_FRAGMENT_BYTES = 8
_DONE = re.compile(rb"(?:^|[\r\n]) *data: ?\[DONE\]\s*$")
# Only to know which limit runs; the parser decides later what is a token.
_TOKEN = re.compile(rb'"token_ids": ?\[ ?\d|"(?:text|content|reasoning|reasoning_content|arguments)": ?"[^"]')
_OVERLAP = 40


@dataclass(slots=True)
class Reading:
    """One answer as it arrived. problem says why it was given up or cut short, None where the body ended by itself.

    lags_ns: how much later than the kernel this process had each piece; empty where the kernel does not say.
    """

    arrivals: list[Arrival] = field(default_factory=list)  # body bytes, the framing undone
    response: ResponseReader = field(default_factory=ResponseReader)
    ended_ns: int = 0
    problem: str | None = None
    pieces: list[tuple[int, bytes]] = field(default_factory=list)  # (perf_counter_ns, body bytes), once it has ended
    stamped_by: StampedBy | None = None
    sent_stamp_ns: int | None = None  # perf_counter_ns at which the request left, by the kernel
    lags_ns: tuple[int, ...] = ()

    @property
    def body(self) -> bytes:
        """All body bytes."""
        return b"".join(piece for *_, piece in self.arrivals)

    @property
    def says_done(self) -> bool:
        """Whether the last bytes are the [DONE] event."""
        tail = b"".join(piece for *_, piece in self.arrivals[-20:])[-20:]
        return _DONE.search(tail) is not None

    def take_all(self, raw: list[Arrival]) -> bytes:
        """Undoes the framing of what arrived and empties the list. Returns the body bytes, now in `arrivals`."""
        waiting = raw[:]
        raw.clear()
        taken = []
        for t_ns, ancillary, piece in waiting:
            self.ended_ns = t_ns
            if not piece:
                self.response.end_of_connection()
                continue
            body = self.response.feed(piece)
            if body:
                self.arrivals.append((t_ns, ancillary, body))
                taken.append(body)
        return b"".join(taken)

    def last_token_ns(self, since_ns: int) -> int | None:
        """When something that looks like a token last came, later than since_ns; None where nothing did."""
        tail = b""
        for t_ns, _, piece in reversed(self.arrivals):
            if t_ns <= since_ns:
                return None
            tail = piece + tail[:_OVERLAP]
            if _TOKEN.search(tail):
                return t_ns
        return None


def read_answer(source: Arrivals, sent_ns: int, prompt_tokens: int, limits: LimitsConfig) -> Reading:
    """Reads one answer to its end or to a limit. Network trouble becomes `problem`, never an exception."""
    reading = Reading(ended_ns=sent_ns)
    offset_before_ns = wall_offset_ns()
    stream_deadline_ns = sent_ns + round(limits.stream_s * NS_PER_S)
    limit = f"no token within the limit of {limits.first_token_limit_s(prompt_tokens):g} s"
    try:
        first_deadline_ns = sent_ns + round(limits.first_token_limit_s(prompt_tokens) * NS_PER_S)
        _read_to_first_token(source, reading, min(first_deadline_ns, stream_deadline_ns))
        source.tokens_begin()
        limit = f"stalled: no token for {limits.stall_s:g} s"
        _read_on(source, reading, round(limits.stall_s * NS_PER_S), stream_deadline_ns)
    except TimeoutError:
        reading.ended_ns = perf_counter_ns()
        if not reading.says_done:
            is_over = reading.ended_ns >= stream_deadline_ns
            reading.problem = (
                f"the whole stream took longer than its limit of {limits.stream_s:g} s" if is_over else limit
            )
    except HttpFramingError as error:
        reading.problem = error.message
    except OSError as error:
        reading.ended_ns = perf_counter_ns()
        reading.problem = f"the connection broke: {error}"
    stamps = settle(reading.arrivals, offset_before_ns, wall_offset_ns())
    reading.pieces = [(t_ns, body) for t_ns, (*_, body) in zip(stamps.times_ns, reading.arrivals, strict=True)]
    reading.stamped_by, reading.lags_ns = stamps.stamped_by, stamps.lags_ns
    wall_ns = source.sent_stamp_ns()
    if wall_ns is not None and stamps.stamped_by is StampedBy.KERNEL:
        reading.sent_stamp_ns = wall_ns - offset_before_ns
    return reading


def _read_to_first_token(source: Arrivals, reading: Reading, deadline_ns: int) -> None:
    """Headers, pings, role-only events: until something that looks like a token is in, or the answer has ended."""
    tail = b""
    raw: list[Arrival] = []
    while not reading.response.complete:
        source.settimeout(_seconds_left(deadline_ns))
        source.receive(raw)
        body = reading.take_all(raw)
        if _TOKEN.search(tail + body):
            return
        tail = (tail + body)[-_OVERLAP:]


def _read_on(source: Arrivals, reading: Reading, stall_ns: int, deadline_ns: int) -> None:
    """The rest: a step costs taking it and little else; the framing is undone when the end may have come."""
    raw: list[Arrival] = []
    receive = source.receive
    near_deadline_ns = deadline_ns - stall_ns
    progress_ns = reading.ended_ns
    undo_each = not reading.response.is_open_ended
    source.settimeout(min(stall_ns / NS_PER_S, _seconds_left(deadline_ns)))
    try:
        while not reading.response.complete:
            piece = receive(raw)
            t_ns = raw[-1][0]
            if t_ns - progress_ns > stall_ns:  # signs of life are no progress: has a token come since?
                reading.take_all(raw)
                last_ns = reading.last_token_ns(progress_ns)
                if last_ns is None or t_ns - last_ns > stall_ns:
                    raise TimeoutError
                progress_ns = last_ns
            if t_ns > near_deadline_ns:
                source.settimeout(_seconds_left(deadline_ns))
            if undo_each or len(piece) < _FRAGMENT_BYTES or piece.endswith(b"\r\n\r\n") or b"[DONE]" in piece:
                reading.take_all(raw)
                if reading.says_done:
                    source.settimeout(AFTER_DONE_S)
    finally:
        reading.take_all(raw)


def _seconds_left(deadline_ns: int) -> float:
    left_ns = deadline_ns - perf_counter_ns()
    if left_ns <= 0:
        raise TimeoutError
    return left_ns / NS_PER_S
