"""Reading one answer off the socket: stamped first, parsed later, given up at its limits.

After the first token the bytes are only stamped and kept; HTTP framing and JSON wait until the stream has ended, so
that a 64K-token prompt or 5,000 events a second cannot make the next stamp late.
"""

import re
import socket
from dataclasses import dataclass, field
from time import perf_counter_ns

from .http_response import HttpFramingError, ResponseReader

NS_PER_S = 1_000_000_000
RECV_BYTES = 65_536
AFTER_DONE_S = 1.0  # how long the body may stay open after [DONE]
_FRAGMENT_BYTES = 8
_DONE = re.compile(rb"(?:^|[\r\n]) *data: ?\[DONE\]\s*$")
# Only to know which limit runs; the parser decides later what is a token.
_FIRST_TOKEN = re.compile(rb'"token_ids": ?\[ ?\d|"(?:text|content|reasoning|reasoning_content|arguments)": ?"[^"]')
_OVERLAP = 40


@dataclass(frozen=True)
class StreamLimits:
    """When a stream is given up and void; the same for every build of a run.

    The first token may take first_token_s plus first_token_ms_per_prompt_token for each token of the prompt.
    """

    connect_s: float = 10.0
    first_token_s: float = 60.0
    first_token_ms_per_prompt_token: float = 10.0
    stall_s: float = 60.0
    stream_s: float = 1800.0
    idle_reuse_s: float = 2.0  # an idle connection older than this is opened anew
    busy_retries: int = 3  # a 429 or 503 generated nothing: asked again so often
    busy_wait_s: float = 1.0

    def first_token_limit_s(self, prompt_tokens: int) -> float:
        """The limit for the first token of a prompt of this length, in seconds."""
        return self.first_token_s + self.first_token_ms_per_prompt_token * prompt_tokens / 1000


@dataclass(slots=True)
class Reading:
    """One answer as it arrived. problem says why it was given up or cut short, None where the body ended by itself."""

    pieces: list[tuple[int, bytes]] = field(default_factory=list)  # (perf_counter_ns right after recv, body bytes)
    response: ResponseReader = field(default_factory=ResponseReader)
    ended_ns: int = 0
    problem: str | None = None

    @property
    def body(self) -> bytes:
        """All body bytes."""
        return b"".join(piece for _, piece in self.pieces)

    @property
    def says_done(self) -> bool:
        """Whether the last bytes are the [DONE] event."""
        tail = b"".join(piece for _, piece in self.pieces[-20:])[-20:]
        return _DONE.search(tail) is not None

    def take(self, t_ns: int, piece: bytes) -> bytes:
        """Undoes the framing of one piece, empty where the connection ended. Returns its body bytes, now in pieces."""
        self.ended_ns = t_ns
        if not piece:
            self.response.end_of_connection()
            return b""
        body = self.response.feed(piece)
        if body:
            self.pieces.append((t_ns, body))
        return body

    def take_all(self, raw: list[tuple[int, bytes]]) -> None:
        """Takes the pieces in order and empties the list."""
        waiting = raw[:]
        raw.clear()
        for t_ns, piece in waiting:
            self.take(t_ns, piece)


def read_answer(source: socket.socket, sent_ns: int, prompt_tokens: int, limits: StreamLimits) -> Reading:
    """Reads one answer to its end or to a limit. Network trouble becomes `problem`, never an exception."""
    reading = Reading(ended_ns=sent_ns)
    stream_deadline_ns = sent_ns + round(limits.stream_s * NS_PER_S)
    limit = f"no token within the limit of {limits.first_token_limit_s(prompt_tokens):g} s"
    try:
        first_deadline_ns = sent_ns + round(limits.first_token_limit_s(prompt_tokens) * NS_PER_S)
        _read_to_first_token(source, reading, min(first_deadline_ns, stream_deadline_ns))
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
    return reading


def _read_to_first_token(source: socket.socket, reading: Reading, deadline_ns: int) -> None:
    """Headers, pings, role-only events: until something that looks like a token is in, or the answer has ended."""
    tail = b""
    while not reading.response.complete:
        source.settimeout(_seconds_left(deadline_ns))
        piece = source.recv(RECV_BYTES)
        reading.ended_ns = perf_counter_ns()
        body = reading.take(reading.ended_ns, piece)
        if _FIRST_TOKEN.search(tail + body):
            return
        tail = (tail + body)[-_OVERLAP:]


def _read_on(source: socket.socket, reading: Reading, stall_ns: int, deadline_ns: int) -> None:
    """The rest: a step costs a recv, a stamp and an append; the framing is undone when the end may have come."""
    raw: list[tuple[int, bytes]] = []
    recv, keep = source.recv, raw.append
    near_deadline_ns = deadline_ns - stall_ns
    progress_ns = reading.ended_ns
    undo_each = not reading.response.is_open_ended
    source.settimeout(min(stall_ns / NS_PER_S, _seconds_left(deadline_ns)))
    try:
        while not reading.response.complete:
            piece = recv(RECV_BYTES)
            t_ns = perf_counter_ns()
            keep((t_ns, piece))
            is_fragment = len(piece) < _FRAGMENT_BYTES
            if is_fragment or b"data" in piece:
                progress_ns = t_ns
            elif t_ns - progress_ns > stall_ns:  # comment lines are a sign of life, not progress
                raise TimeoutError
            if t_ns > near_deadline_ns:
                source.settimeout(_seconds_left(deadline_ns))
            if is_fragment or undo_each or piece.endswith(b"\r\n\r\n") or b"[DONE]" in piece:
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
