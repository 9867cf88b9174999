"""Reading one answer off the socket: stamped first, parsed later, given up at its limits.

Between two recv calls only the HTTP framing is undone and the bytes are kept; JSON waits until the stream has ended, so
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
_COMMENT = 0x3A  # ":"
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


def read_answer(source: socket.socket, sent_ns: int, prompt_tokens: int, limits: StreamLimits) -> Reading:
    """Reads one answer to its end or to a limit. Network trouble becomes `problem`, never an exception."""
    reading = Reading(ended_ns=sent_ns)
    clock = _LimitClock(sent_ns, prompt_tokens, limits)
    feed, keep, recv = reading.response.feed, reading.pieces.append, source.recv
    try:
        while True:
            wait_s = clock.new_wait_s(reading.ended_ns)
            if wait_s is not None:
                source.settimeout(wait_s)
            piece = recv(RECV_BYTES)
            t_ns = reading.ended_ns = perf_counter_ns()
            if not piece:
                reading.response.end_of_connection()
                return reading
            body = feed(piece)
            if body:
                keep((t_ns, body))
                clock.arrived(t_ns, body)
            if reading.response.complete:
                return reading
    except TimeoutError:
        reading.ended_ns = perf_counter_ns()
        reading.problem = clock.expired()
    except HttpFramingError as error:
        reading.problem = error.message
    except OSError as error:
        reading.ended_ns = perf_counter_ns()
        reading.problem = f"the connection broke: {error}"
    return reading


class _LimitClock:
    """Which limit runs now, and when it ends."""

    def __init__(self, sent_ns: int, prompt_tokens: int, limits: StreamLimits) -> None:
        self._first_limit_s = limits.first_token_limit_s(prompt_tokens)
        self._stall_s = limits.stall_s
        self._stream_s = limits.stream_s
        self._stall_ns = round(limits.stall_s * NS_PER_S)
        self._first_deadline_ns = sent_ns + round(self._first_limit_s * NS_PER_S)
        self._stream_deadline_ns = sent_ns + round(limits.stream_s * NS_PER_S)
        self._last_progress_ns = sent_ns
        self._has_token = False
        self._is_done = False
        self._wait_is_stall = False
        self._tail = b""

    def arrived(self, t_ns: int, body: bytes) -> None:
        """Takes note of a body piece; a comment line is a sign of life, not progress."""
        if not self._has_token:
            self._has_token = _FIRST_TOKEN.search(self._tail + body) is not None
            self._tail = body[-_OVERLAP:]
        if body[0] != _COMMENT:
            self._last_progress_ns = t_ns
        if body.endswith(b"\n") and b"[DONE]" in body[-20:]:
            self._is_done = True

    def new_wait_s(self, now_ns: int) -> float | None:
        """How long the next recv may wait, None where the wait set before still holds. Raises TimeoutError."""
        if self._is_done:
            return AFTER_DONE_S
        if now_ns > self._stream_deadline_ns:
            raise TimeoutError
        whole_left_ns = self._stream_deadline_ns - now_ns
        if not self._has_token:
            self._wait_is_stall = False
            return self._positive_s(min(self._first_deadline_ns - now_ns, whole_left_ns))
        idle_ns = now_ns - self._last_progress_ns
        if idle_ns == 0 and whole_left_ns > self._stall_ns:
            if self._wait_is_stall:
                return None  # the usual case, once a step: the socket's timeout already is the stall limit
            self._wait_is_stall = True
            return self._stall_s
        self._wait_is_stall = False
        return self._positive_s(min(self._stall_ns - idle_ns, whole_left_ns))

    def expired(self) -> str | None:
        """The limit that ended the wait, in words; None where the stream had said [DONE]."""
        if self._is_done:
            return None
        now_ns = perf_counter_ns()
        if now_ns >= self._stream_deadline_ns:
            return f"the whole stream took longer than its limit of {self._stream_s:g} s"
        if not self._has_token:
            return f"no token within the limit of {self._first_limit_s:g} s"
        return f"stalled: no token for {self._stall_s:g} s"

    @staticmethod
    def _positive_s(left_ns: int) -> float:
        if left_ns <= 0:
            raise TimeoutError
        return left_ns / NS_PER_S
