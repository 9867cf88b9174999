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

from .completion import ChatMessage, CompletionRequest, StreamOutcome
from .connection import Connection
from .reading import Reading, StreamLimits, read_answer
from .records import StreamStatus, Usage
from .storage import now_utc
from .stream_checks import events_are_steps, problems
from .token_counts import TextTokenizer, count_tokens
from .transcript import error_message, read_transcript

__all__ = ["ChatMessage", "CompletionRequest", "StreamLimits", "StreamOutcome", "StreamingClient"]

BUSY_STATUSES = (429, 503)
# Fields beyond OpenAI's own, in the order in which they are given up where a server refuses the request over them.
OPTIONAL_FIELDS = ("continuous_usage_stats", "return_token_ids", "ignore_eos")


@dataclass
class _Sent:
    """One request on its way: what was sent when, and what came back."""

    sent_ns: int
    connect_ns: int
    wall_utc: str
    reading: Reading = field(default_factory=Reading)
    process_ns: int = 0


class StreamingClient:
    """Streams completions from one server over one kept connection. Not for use by several threads."""

    def __init__(
        self,
        base_url: str,
        limits: StreamLimits | None = None,
        *,
        tokenizer: TextTokenizer | None = None,
        api_key: str | None = None,
    ) -> None:
        self.limits = limits or StreamLimits()
        self._tokenizer = tokenizer
        self._api_key = api_key
        self._connection = Connection(base_url, connect_s=self.limits.connect_s, idle_reuse_s=self.limits.idle_reuse_s)
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
        while True:
            path, body = self._payload(request)
            sent = self._exchange(path, body, request.depth)
            status = sent.reading.response.status
            if status is not None and status != 200 and sent.reading.problem is None:
                message = f"HTTP {status}: {error_message(sent.reading.body)}"
                if status in BUSY_STATUSES and len(refusals) < self.limits.busy_retries:
                    refusals.append(message)
                    sleep(self.limits.busy_wait_s)
                    continue
                if status in (400, 422) and self._give_up_a_field(message):
                    continue
                return _void(sent, message, refusals)
            if sent.reading.problem is not None and not sent.reading.pieces:
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

    def _payload(self, request: CompletionRequest) -> tuple[str, bytes]:
        stream_options: dict[str, object] = {"include_usage": True}
        payload: dict[str, object] = {
            "model": request.model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": stream_options,
        }
        if request.seed is not None:
            payload["seed"] = request.seed
        if "continuous_usage_stats" not in self._given_up:
            stream_options["continuous_usage_stats"] = True
        if "return_token_ids" not in self._given_up:
            payload["return_token_ids"] = True
        if request.ignore_eos and "ignore_eos" not in self._given_up:
            payload["ignore_eos"] = True
        if request.messages:
            payload["messages"] = [{"role": m.role, "content": m.content} for m in request.messages]
            return "/v1/chat/completions", json.dumps(payload).encode()
        payload["prompt"] = list(request.prompt_ids)
        return "/v1/completions", json.dumps(payload).encode()

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
        try:
            sent.connect_ns = connection.open_if_needed()
        except OSError as error:
            sent.reading.problem = f"cannot connect to {connection.host}:{connection.port}: {error}"
            sent.reading.ended_ns = perf_counter_ns()
            return sent
        with _quiet_process():
            sent.wall_utc = now_utc()
            try:
                sent.sent_ns = connection.send(self._head(path, len(body)) + body)
            except OSError as error:
                sent.sent_ns = sent.reading.ended_ns = perf_counter_ns()
                sent.reading.problem = f"the connection broke while the request was sent: {error}"
                connection.close()
                return sent
            start_ns = thread_time_ns()
            sent.reading = read_answer(connection.socket, sent.sent_ns, prompt_tokens, self.limits)
            sent.process_ns = thread_time_ns() - start_ns
        if sent.reading.response.keep_alive and sent.reading.problem is None:
            connection.rest()
        else:
            connection.close()
        return sent

    def _head(self, path: str, length: int) -> bytes:
        lines = [
            f"POST {self._connection.path}{path} HTTP/1.1",
            f"Host: {self._connection.host_header}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Accept-Encoding: identity",
            f"Content-Length: {length}",
        ]
        if self._api_key:
            lines.append(f"Authorization: Bearer {self._api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _judge(self, request: CompletionRequest, sent: _Sent, refusals: Sequence[str]) -> StreamOutcome:
        start_ns = thread_time_ns()
        reading = sent.reading
        transcript = read_transcript(reading.pieces, is_whole=reading.problem is None)
        if not transcript.chunks and reading.response.headers.get("content-type", "").startswith("application/json"):
            transcript.problem = f"the server did not stream: {error_message(reading.body)}"
        counts = count_tokens(transcript, self._tokenizer)
        reasons = problems(request, transcript, counts, self.limits, self._tokenizer)
        # A break or a limit explains more than what it left unfinished; the server's own words explain most.
        reason = transcript.problem or reading.problem or next(reasons, None)
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
            http_status=reading.response.status,
            process_ns=sent.process_ns + thread_time_ns() - start_ns,
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
