"""One thread that decodes, one request after the other, and a short queue before it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..cancellation import CancelledError, cancellable
from ..errors import DecoderError, RequestError
from ..generate import Step
from ..streaming_text import TextStream, TokenBytes
from .metrics_text import ServerCounters
from .request import GenerationRequest

log = logging.getLogger("kernarc.serve")
THREAD_ENDED = "the decoder has stopped after an unexpected error; see the server's log"


class StepSource(Protocol):
    """What the server needs of a decoder."""

    eos_token_ids: frozenset[int]

    def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, ignore_eos: bool, stop_token_ids: Sequence[int]
    ) -> Iterator[Step]:
        """Steps of one greedy sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """One step as a client sees it. total: tokens sent up to and with it; finish: set on the last piece."""

    token_ids: tuple[int, ...]
    text: str
    total: int
    finish: str | None
    stopped_by: str | None


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the worker.

    on_piece is called in the worker's thread and returns whether to go on. on_end is called once, with how it ended
    (stop, length, cancelled, error, refused) and the error's message.
    """

    request: GenerationRequest
    on_piece: Callable[[Piece], bool]
    on_end: Callable[[str, str], None]
    cancelled: threading.Event = field(default_factory=threading.Event)


class DecoderWorker:
    """Runs jobs in order of arrival in one daemon thread."""

    def __init__(
        self, decoder: StepSource, tokenizer: TokenBytes | None, counters: ServerCounters, *, queue_limit: int
    ) -> None:
        self._decoder, self._tokenizer, self._counters = decoder, tokenizer, counters
        self._queue_limit = queue_limit
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._stopping = False
        self._is_alive = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kernarc-decoder", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """Queue a job; False where one is running and the queue is full."""
        with self._changed:
            if len(self._waiting) + (self._running is not None) > self._queue_limit:
                return False
            if self._is_alive:
                self._waiting.append(job)
                self._count()
                return True
        self._end(job, "error", THREAD_ENDED)
        return True

    @property
    def is_alive(self) -> bool:
        """Whether jobs are still decoded; False after an error nobody expected."""
        return self._is_alive

    def cancel(self, job: Job) -> None:
        """The client is gone: a waiting job gives up its place at once, a running one ends with its step."""
        job.cancelled.set()
        with self._changed:
            if job not in self._waiting:
                return
            self._waiting.remove(job)
            self._count()
        self._end(job, "cancelled", "")

    def stop(self, timeout_s: float) -> bool:
        """Cancel everything and wait for the thread; False where it is still inside a step."""
        with self._changed:
            self._stopping = True
            jobs = [*self._waiting, *([self._running] if self._running else [])]
            self._changed.notify()
        for job in jobs:
            self.cancel(job)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _count(self) -> None:
        self._counters.running = int(self._running is not None)
        self._counters.waiting = len(self._waiting)
        self._changed.notify()

    def _end(self, job: Job, ended: str, message: str) -> None:
        self._counters.count_request(ended)
        job.on_end(ended, message)

    def _run(self) -> None:
        """The thread: decode until stop(); whatever ends it, nobody is left waiting."""
        try:
            self._decode_jobs()
        finally:
            with self._changed:
                self._is_alive = False
                left = [*([self._running] if self._running else []), *self._waiting]
                self._waiting.clear()
            for job in left:
                self._end(job, "error", THREAD_ENDED)

    def _decode_jobs(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                job = self._running = self._waiting.popleft()
                self._count()
            message = ""
            try:
                with cancellable(job.cancelled.is_set):
                    ended = self._decode(job)
            except CancelledError:
                ended = "cancelled"
            except RequestError as error:  # what only the decoder could find; the server is not at fault
                ended, message = "refused", str(error)
            except (DecoderError, RuntimeError, MemoryError) as error:  # RuntimeError: what PyTorch raises
                log.exception("decoding failed")
                ended, message = "error", str(error) or type(error).__name__
            with self._changed:
                self._running = None
                self._count()
            self._end(job, ended, message)

    def _decode(self, job: Job) -> str:
        request, counters = job.request, self._counters
        ends = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            ends |= self._decoder.eos_token_ids
        text = TextStream(
            self._tokenizer,
            stops=request.stop,
            skip_special_tokens=request.skip_special_tokens,
            silent_ids=ends,
        )
        counters.prompt_tokens += len(request.prompt_ids)
        steps = self._decoder.generate(
            request.prompt_ids,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            stop_token_ids=request.stop_token_ids,
        )
        total = 0
        for step in steps:
            piece = _piece(step, text, total, request.max_tokens, ends)
            total = piece.total
            sent = len(piece.token_ids)
            # the step's own last token is never a draft unless it was trimmed there
            counters.count_step(step.drafted, min(step.accepted, sent), sent)
            if job.cancelled.is_set() or not job.on_piece(piece):
                return "cancelled"
            if piece.finish:
                return piece.finish
        # The decoder ended by itself: an empty last piece says so.
        held, stopped_by = text.finish()
        finish = "stop" if stopped_by else "length"
        return finish if job.on_piece(Piece((), held, total, finish, stopped_by)) else "cancelled"


def _piece(step: Step, text: TextStream, total: int, max_tokens: int, ends: frozenset[int]) -> Piece:
    shown = text.push(step.token_ids)
    total += len(shown.token_ids)
    if shown.stopped_by is not None:
        return Piece(shown.token_ids, shown.text, total, "stop", shown.stopped_by)
    at_end = shown.token_ids[-1] in ends
    if not at_end and total < max_tokens:
        return Piece(shown.token_ids, shown.text, total, None, None)
    held, stopped_by = text.finish()
    finish = "stop" if at_end or stopped_by else "length"
    return Piece(shown.token_ids, shown.text + held, total, finish, stopped_by)
