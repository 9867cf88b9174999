"""The conformance server: plays a case at exactly known times and keeps the truth.

One thread a connection; one stream at a time is timed well. GET /cases lists the cases, GET /truth what was played.
"""

import gc
import json
import socket
import struct
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event, Lock, Thread
from time import perf_counter_ns, sleep

from .case import Case, Refusal
from .cases import CASES
from .pacing import wait_until
from .render import render
from .request import (
    BadRequestError,
    HttpRequest,
    Json,
    asked_of,
    case_of,
    count_prompt,
    parse_json,
    prompt_digest,
    read_request,
)
from .shape import Break, Framing
from .tcp_writes import Write
from .truth import Truth, TruthEvent

TRUTH_WAIT_S = 1.0
CLOSE_DELAY_S = 0.05  # how long after its answer a server that closes idle connections does so


class Server:
    """Listens at once; serve_forever plays. port 0 takes a free one, see `port`."""

    def __init__(self, case: Case, host: str = "127.0.0.1", port: int = 0, truth_log: Path | None = None) -> None:
        self._case = case
        self._truth_log = truth_log
        self._streams: list[_Stream] = []
        self._times_asked: dict[str, int] = {}
        self._seen_prompts: set[tuple[str, str]] = set()
        self._lock = Lock()
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]

    def serve_forever(self) -> None:
        """Accepts until the process ends."""
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        buffered = b""
        with connection:
            try:
                while True:
                    request, buffered = read_request(connection, buffered)
                    if request is None or not self._answer(connection, request):
                        return
            except OSError:
                return  # the client has gone: its stream ends here

    def _answer(self, connection: socket.socket, request: HttpRequest) -> bool:
        """Answers one request; returns whether the connection stays."""
        received_ns = perf_counter_ns()
        try:
            payload = parse_json(request.body)
            case, path = case_of(request.path, payload, self._case)
            if path in ("/v1/completions", "/v1/chat/completions"):
                return self._complete(connection, case, payload, received_ns, is_chat="chat" in path)
            _send_json(connection, 200, self._plain_answer(case, path, payload))
        except BadRequestError as error:
            _send_json(connection, 400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})
        except KeyError:
            _send_json(connection, 404, {"error": {"message": f"no such path: {request.path}", "code": 404}})
        return True

    def _plain_answer(self, case: Case, path: str, payload: Json) -> object:
        if path == "/health":
            return {}
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": name, "object": "model"} for name in CASES]}
        if path == "/cases":
            return [asdict(each) for each in CASES.values()]
        if path.startswith("/truth"):
            return [stream.truth().to_json() for stream in self._streams[_after(path) :]]
        if path == "/tokenize" and case.shape.has_tokenize:
            return {"count": count_prompt(payload, case), "max_model_len": 1 << 20}
        raise KeyError(path)

    def _complete(
        self, connection: socket.socket, case: Case, payload: Json, received_ns: int, *, is_chat: bool
    ) -> bool:
        asked = asked_of(payload, case, is_chat=is_chat)
        refusal = self._refusal(case)
        if refusal is not None:
            _send_json(connection, refusal.status, {"error": {"message": refusal.message, "code": refusal.status}})
            return True
        digest = prompt_digest(payload)
        stream = _Stream(case.name, received_ns, asked.prompt_tokens, digest)
        self._streams.append(stream)
        if case.closes_without_answer:
            stream.is_over.set()
            return False
        shape = case.shape
        if case.caches_prompts and (case.name, digest) in self._seen_prompts:
            shape = replace(shape, cached_tokens=asked.prompt_tokens, first_token_ms=shape.first_token_ms / 49)
        self._seen_prompts.add((case.name, digest))
        if not shape.no_delay:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        try:
            _play(connection, render(shape, asked), received_ns, stream.events)
        finally:
            stream.is_over.set()
            self._log(stream.truth())
        return _after_stream(connection, case)

    def _refusal(self, case: Case) -> Refusal | None:
        """The next refusal due: each once and then a stream, over and over; for a void case always the first."""
        if case.refusals and case.void:
            return case.refusals[0]
        asked = self._times_asked.get(case.name, 0)
        self._times_asked[case.name] = asked + 1
        return (*case.refusals, None)[asked % (len(case.refusals) + 1)]

    def _log(self, truth: Truth) -> None:
        if self._truth_log is not None:
            with self._lock, self._truth_log.open("a") as log:
                log.write(json.dumps(truth.to_json()) + "\n")


@dataclass
class _Stream:
    """One stream being played, then played."""

    case: str
    received_ns: int
    prompt_tokens: int
    prompt_sha256: str
    events: list[TruthEvent] = field(default_factory=list)
    is_over: Event = field(default_factory=Event)

    def truth(self) -> Truth:
        """What was played, after waiting a little for its end: a client may ask before the last write has returned."""
        self.is_over.wait(TRUTH_WAIT_S)
        return Truth(self.case, self.received_ns, self.prompt_tokens, self.prompt_sha256, tuple(self.events))


def _after(path: str) -> int:
    """How many streams to leave out: /truth?after=N. Raises BadRequestError."""
    name, _, number = path.partition("?")[2].partition("=")
    if not name:
        return 0
    if name != "after" or not number.isdigit():
        raise BadRequestError("ask for /truth or /truth?after=N")
    return int(number)


def _play(connection: socket.socket, writes: list[Write], received_ns: int, events: list[TruthEvent]) -> None:
    """Each write at its absolute time; events gets those that complete tokens. Raises OSError where the client left."""
    gc.collect()
    gc.disable()
    try:
        for write in writes:
            due_ns = received_ns + round(write.due_ms * 1e6)
            written_ns = wait_until(due_ns)
            connection.sendall(write.data)
            if write.tokens:
                events.append(TruthEvent(due_ns, written_ns, write.tokens, perf_counter_ns()))
    finally:
        gc.enable()


def _after_stream(connection: socket.socket, case: Case) -> bool:
    """Ends the connection the way the case wants; returns whether it stays."""
    shape = case.shape
    if shape.breaks is Break.RESET:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False
    if case.closes_after_answer:
        sleep(CLOSE_DELAY_S)
        return False
    if shape.breaks is Break.STALL or shape.stays_open_after_done:
        connection.recv(1)  # until the client gives up
        return False
    return shape.breaks is not Break.CLOSE and shape.framing is not Framing.CLOSE


def _send_json(connection: socket.socket, status: int, value: object) -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
