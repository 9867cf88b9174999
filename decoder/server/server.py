"""The OpenAI-compatible HTTP server: routes, refusals, and answers from one decoder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import HttpVersion11, web

from ..errors import RequestError
from . import metrics_text
from .request import GenerationRequest, ServedModel, UnknownModelError, parse_chat, parse_completion, parse_json
from .sse import AnswerFormat, error_body, error_event
from .stream_writer import StreamWriter
from .worker import THREAD_ENDED, DecoderWorker, Job, Piece

MAX_BODY_BYTES = 16 << 20  # 262,144 ids of 6 digits are 2 MB
RETRY_AFTER_S = 1
_CANCELLED = "the stream was cancelled: the server is shutting down, or the client stopped reading"
# How a job ends without an answer: the error's type and HTTP status, inside a stream its code.
_FAULTS = {
    "error": ("internal_error", 500),
    "cancelled": ("internal_error", 500),
    "refused": ("invalid_request_error", 400),
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _UnreadableBodyError(RequestError):
    """A body that breaks off or does not decode."""


class DecoderServer:
    """The routes over one worker."""

    def __init__(self, model: ServedModel, worker: DecoderWorker, counters: metrics_text.ServerCounters) -> None:
        self._model, self._worker, self._counters = model, worker, counters
        self._started = int(time.time())

    def application(self) -> web.Application:
        """The aiohttp application; run it with handler_cancellation=True, which notices a client's leaving."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_refusals_as_json])
        for path, get in (("/health", self._health), ("/metrics", self._metrics), ("/v1/models", self._models)):
            app.router.add_get(path, get)
        for path, post in (
            ("/v1/completions", self._completions),
            ("/v1/chat/completions", self._chat),
            ("/tokenize", self._tokenize),
            ("/detokenize", self._detokenize),
        ):
            app.router.add_post(path, post, expect_handler=_expect)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_completion(await _json_of(request), self._model))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_chat(await _json_of(request), self._model))

    async def _answer(self, request: web.Request, generation: GenerationRequest) -> web.StreamResponse:
        answer = AnswerFormat(generation, self._model.names[0])
        if generation.stream:
            return await self._stream(request, generation, answer)
        return await self._whole(generation, answer)

    async def _stream(
        self, request: web.Request, generation: GenerationRequest, answer: AnswerFormat
    ) -> web.StreamResponse:
        chunked = request.version >= HttpVersion11
        if request.transport is None:
            raise ConnectionResetError("the client left before its answer began")
        writer = StreamWriter(request.transport, chunked=chunked)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[str, str]] = loop.create_future()

        def on_piece(piece: Piece) -> bool:
            event = answer.event(piece.token_ids, piece.text, piece.total, piece.finish, piece.stopped_by)
            if piece.finish:
                event += answer.last_events(piece.total)
            return writer.send(event, job.cancelled)

        def on_end(how: str, message: str) -> None:
            writer.close()
            loop.call_soon_threadsafe(_settle, ended, (how, message))

        job = Job(generation, on_piece, on_end)
        if not self._worker.submit(job):
            writer.close()
            return self._busy()
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        if chunked:
            response.enable_chunked_encoding()
        try:
            await response.prepare(request)
            await writer.open()
            how, message = await ended
        except BaseException:
            self._worker.cancel(job)
            writer.abandon()
            raise
        with contextlib.suppress(ConnectionResetError):  # many clients leave as soon as they have read [DONE]
            if how in _FAULTS:
                await response.write(error_event(message or _CANCELLED, *_FAULTS[how]))
            await response.write_eof()
        return response

    async def _whole(self, generation: GenerationRequest, answer: AnswerFormat) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[str, str]] = loop.create_future()
        pieces: list[Piece] = []

        def on_piece(piece: Piece) -> bool:
            pieces.append(piece)
            return True

        def on_end(how: str, message: str) -> None:
            loop.call_soon_threadsafe(_settle, ended, (how, message))

        job = Job(generation, on_piece, on_end)
        if not self._worker.submit(job):
            return self._busy()
        try:
            how, message = await ended
        except BaseException:
            self._worker.cancel(job)
            raise
        if how in _FAULTS:
            kind, status = _FAULTS[how]
            return _error(status, message or _CANCELLED, kind)
        token_ids = [token for piece in pieces for token in piece.token_ids]
        text = "".join(piece.text for piece in pieces)
        return web.json_response(answer.answer(token_ids, text, pieces[-1].finish, pieces[-1].stopped_by))

    def _busy(self) -> web.Response:
        self._counters.count_request("refused")
        response = _error(429, "one stream is decoded at a time and the queue is full", "overloaded_error")
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
        return response

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await _json_of(request)
        text = body.get("prompt") if isinstance(body, dict) else None
        if not isinstance(text, str):
            raise RequestError("prompt is missing or not a string")
        if self._model.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer", "send prompts as token ids")
        special = body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise RequestError("add_special_tokens is neither true nor false")
        tokens = self._model.tokenizer.encode(text, add_special_tokens=special)
        return web.json_response({"count": len(tokens), "max_model_len": self._model.max_context, "tokens": tokens})

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        body = await _json_of(request)
        tokens = body.get("tokens") if isinstance(body, dict) else None
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise RequestError("tokens is missing or not a list of token ids")
        if self._model.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer")
        return web.json_response({"prompt": self._model.tokenizer.decode(tokens)})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        common = {"object": "model", "created": self._started, "owned_by": "kernarc"}
        data = [common | {"id": name, "max_model_len": self._model.max_context} for name in self._model.names[:1]]
        return web.json_response({"object": "list", "data": data})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if not self._worker.is_alive:
            return _error(503, THREAD_ENDED, "internal_error")
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        text = metrics_text.render(self._counters)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _settle(future: asyncio.Future[tuple[str, str]], result: tuple[str, str]) -> None:
    if not future.done():
        future.set_result(result)


async def _json_of(request: web.Request) -> Any:
    _check_length(request)
    try:
        return parse_json(await request.read())
    except web.RequestPayloadError as error:  # a bad chunk or content encoding
        raise _UnreadableBodyError(f"the request body cannot be read: {error}") from None


def _check_length(request: web.Request) -> None:
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(max_size=MAX_BODY_BYTES, actual_size=request.content_length or 0)


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Refuses a body that is too long before the client sends it."""
    try:
        _check_length(request)
    except web.HTTPRequestEntityTooLarge as refusal:
        return _refusal(request, refusal)
    if request.headers.get("Expect", "").lower() != "100-continue":
        return _error(417, "the only Expect header known is 100-continue", "invalid_request_error")
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


def _error(status: int, message: str, kind: str) -> web.Response:
    body = error_body(message, kind, status)
    return web.json_response(body, status=status, dumps=lambda value: json.dumps(value, ensure_ascii=False))


@web.middleware
async def _refusals_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal in OpenAI's error shape."""
    try:
        return await handler(request)
    except RequestError as error:
        message = f"{error.message}; {error.hint}" if error.hint else error.message
        status = 404 if isinstance(error, UnknownModelError) else 400
        response = _error(status, message, "not_found_error" if status == 404 else "invalid_request_error")
        if isinstance(error, _UnreadableBodyError):
            response.force_close()  # where the next request would begin is not known
        return response
    except web.HTTPException as refusal:
        if refusal.status < 400:
            raise
        return _refusal(request, refusal)


def _refusal(request: web.Request, refusal: web.HTTPException) -> web.Response:
    messages = {
        404: f"there is no {request.path}",
        405: f"{request.method} is not allowed on {request.path}",
        413: f"the request body is over {MAX_BODY_BYTES >> 20} MiB",
    }
    response = _error(refusal.status, messages.get(refusal.status, refusal.reason), "invalid_request_error")
    if refusal.status == 413:
        response.force_close()  # the rest of the body is not read
    if refusal.status == 405:
        response.headers["Allow"] = refusal.headers.get("Allow", "")
    return response
