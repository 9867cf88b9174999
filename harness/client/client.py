"""The measuring client: one streamed request at a time, every arrival stamped at the socket.

A stream comes back as a StreamOutcome, ok or void with the reason; nothing a server does raises here.
"""

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns, sleep, thread_time_ns
from typing import Self

from ..config.models import LimitsConfig
from ..run.records import StreamStatus, Usage
from ..run.storage import now_utc
from .checks import events_are_steps, lateness_problem, problems
from .completion import ChatMessage, CompletionRequest, StreamOutcome
from .connection import Connection
from .request_bytes import OPTIONAL_FIELDS, completion_payload, http_post
from .response_reader import Reading, read_answer
from .timestamps import StampedBy, run_queue_wait_ns
from .token_counts import TextTokenizer, count_tokens
from .transcript import error_message, read_transcript

__all__ = ["ChatMessage", "CompletionRequest", "StreamOutcome", "StreamingClient"]

BUSY_STATUSES = (429, 503)


@dataclass
class _Sent:
    """One request on its way: what was sent when, and what came back."""

    sent_ns: int
    connect_ns: int
    wall_utc: str
    reading: Reading = field(default_factory=Reading)
    process_ns: int = 0
    waited_ns: int = 0  # ready to read, without a processor


class StreamingClient:
    """Streams completions from one server over one kept connection. Not for use by several threads.

    stamped_by: PROCESS does without the kernel's stamps, as a client has to that cannot have them.
    idle_reuse_s: how long a connection may rest and be used again.
    busy_retries: how often a 429 or 503, which generated nothing, is asked again.
    """

    def __init__(
        self,
        base_url: str,
        limits: LimitsConfig | None = None,
        *,
        tokenizer: TextTokenizer | None = None,
        api_key: str | None = None,
        stamped_by: StampedBy = StampedBy.KERNEL,
        idle_reuse_s: float = 2.0,
        busy_retries: int = 3,
        busy_wait_s: float = 1.0,
    ) -> None:
        self._limits = limits or LimitsConfig()
        self._busy_retries = busy_retries
        self._busy_wait_s = busy_wait_s
        self._tokenizer = tokenizer
        self._api_key = api_key
        self._connection = Connection(
            base_url,
            connect_s=self._limits.connect_s,
            idle_reuse_s=idle_reuse_s,
            asks_for_stamps=stamped_by is StampedBy.KERNEL,
        )
        self._given_up: set[str] = set()  # optional fields that this server refused

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the kept connection."""
        self._connection.close()

    def complete(self, request: CompletionRequest) -> StreamOutcome:
        """Sends one request and reads its stream to the end, to a limit or to a break."""
        refusals: list[str] = []
        given_up_before = set(self._given_up)
        while True:
            path, body = completion_payload(request, self._given_up)
            sent = self._exchange(path, body, request.depth)
            status = sent.reading.response.status
            if status is not None and status != 200 and sent.reading.problem is None:
                message = f"HTTP {status}: {error_message(sent.reading.body)}"
                if status in BUSY_STATUSES and len(refusals) < self._busy_retries:
                    refusals.append(message)
                    sleep(self._busy_wait_s)
                    continue
                if status in (400, 422) and self._give_up_a_field(message):
                    continue
                self._given_up = given_up_before  # it was not those fields
                return _void(sent, message, refusals)
            if sent.reading.problem is not None and not sent.reading.arrivals:
                return _void(sent, sent.reading.problem, refusals)
            return self._judge(request, sent, refusals)

    def ask(self, path: str, payload: dict[str, object]) -> object | None:
        """One question to the server, not measured: its JSON answer, None where there is no 200 with JSON."""
        reading = self._exchange(path, json.dumps(payload).encode(), prompt_tokens=0).reading
        if reading.problem is not None or reading.response.status != 200:
            return None
        try:
            answer: object = json.loads(reading.body)
        except ValueError:
            return None
        return answer

    def _give_up_a_field(self, message: str) -> bool:
        """Learns from a refusal that names an optional field; returns whether the request is worth another try."""
        for name in OPTIONAL_FIELDS:
            if name in message and name not in self._given_up:
                self._given_up.add(name)
                return True
        return False

    def _exchange(self, path: str, body: bytes, prompt_tokens: int) -> _Sent:
        """One request and its answer, on the kept connection where that is still good."""
        sent = _Sent(perf_counter_ns(), 0, now_utc())
        connection = self._connection
        post = http_post(connection.host_header, connection.path + path, body, self._api_key)
        try:
            sent.connect_ns = connection.open_if_needed()
        except OSError as error:
            sent.reading.problem = f"cannot connect to {connection.host}:{connection.port}: {error}"
            sent.reading.ended_ns = perf_counter_ns()
            return sent
        with _quiet_process():
            sent.wall_utc = now_utc()
            try:
                sent.sent_ns, reconnect_ns = connection.send(post)
                sent.connect_ns += reconnect_ns
            except OSError as error:
                sent.sent_ns = sent.reading.ended_ns = perf_counter_ns()
                sent.reading.problem = f"the connection broke while the request was sent: {error}"
                connection.close()
                return sent
            waited_before_ns = run_queue_wait_ns()
            start_ns = thread_time_ns()
            sent.reading = read_answer(connection.arrivals(), sent.sent_ns, prompt_tokens, self._limits)
            sent.process_ns = thread_time_ns() - start_ns
            sent.waited_ns = run_queue_wait_ns() - waited_before_ns
        if sent.reading.sent_stamp_ns is not None:
            sent.sent_ns = sent.reading.sent_stamp_ns
        if sent.reading.response.keep_alive and sent.reading.problem is None:
            connection.rest()
        else:
            connection.close()
        return sent

    def _judge(self, request: CompletionRequest, sent: _Sent, refusals: Sequence[str]) -> StreamOutcome:
        start_ns = thread_time_ns()
        reading = sent.reading
        transcript = read_transcript(reading.pieces, is_whole=reading.problem is None)
        if not transcript.chunks and reading.response.headers.get("content-type", "").startswith("application/json"):
            transcript.problem = f"the server did not stream: {error_message(reading.body)}"
        if reading.response.headers.get("content-encoding", "identity") != "identity":
            transcript.problem = "the server compressed the stream, which delays tokens by an unknown time"
        counts = count_tokens(transcript, self._tokenizer)
        reasons = problems(request, transcript, counts, self._limits, self._tokenizer)
        # A break or a limit explains more than what it left unfinished; the server's own words explain most.
        reason = transcript.problem or reading.problem or next(reasons, None)
        if reason is None and reading.stamped_by is StampedBy.PROCESS:
            reason = lateness_problem(counts.events, sent.waited_ns)
        return StreamOutcome(
            sent_ns=sent.sent_ns,
            connect_ns=sent.connect_ns,
            ended_ns=reading.ended_ns,
            wall_utc=sent.wall_utc,
            events=counts.events,
            events_are_steps=events_are_steps(counts.events, request.max_tokens_per_step),
            usage=transcript.usage,
            finish_reason=transcript.finish_reason,
            status=StreamStatus.OK if reason is None else StreamStatus.VOID,
            void_reason=reason,
            counted_by=counts.counted_by,
            stamped_by=reading.stamped_by,
            lags_ns=reading.lags_ns,
            http_status=reading.response.status,
            process_ns=sent.process_ns + thread_time_ns() - start_ns,
            reading_ns=sent.process_ns,
            refusals=tuple(refusals),
        )


def _void(sent: _Sent, reason: str, refusals: Sequence[str]) -> StreamOutcome:
    return StreamOutcome(
        sent_ns=sent.sent_ns,
        connect_ns=sent.connect_ns,
        ended_ns=sent.reading.ended_ns,
        wall_utc=sent.wall_utc,
        events=(),
        events_are_steps=False,
        usage=Usage(),
        finish_reason=None,
        status=StreamStatus.VOID,
        void_reason=reason,
        http_status=sent.reading.response.status,
        process_ns=sent.process_ns,
        reading_ns=sent.process_ns,
        refusals=tuple(refusals),
    )


@contextmanager
def _quiet_process() -> Iterator[None]:
    """No garbage collection while a stream is read; nothing here logs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
