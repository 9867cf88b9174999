"""`kernarc-gate serve`: take the port, load the checkpoint, answer until a signal says stop."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from ..checkpoint.tokenizer import TextTokenizer
from ..errors import DecoderError
from ..generate import Decoder
from ..session import AUTO
from .faults import need_plain_session, plant_faults
from .metrics_text import ServerCounters
from .request import ServedModel
from .server import DecoderServer
from .worker import DecoderWorker, StepSource

SHUTDOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What `serve` was asked for."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    num_speculative_tokens: int | str = 3
    draft_vocab: Path | None = None
    draft_window: int | str | None = None
    draft_context: int | str | None = None
    quantize: str | None = None
    prefill_dtype: str = "bf16"
    threads: int | None = None
    max_context: int | None = None
    served_name: str | None = None
    queue_limit: int = 4
    plants: tuple[str, ...] = ()
    plant_seed: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """What is being served, said once when ready."""

    url: str
    model: str
    device: str
    num_speculative_tokens: int | str
    max_context: int


def serve(settings: ServeSettings, on_ready: Callable[[Serving], None]) -> None:
    """Serves until SIGTERM or SIGINT. Raises DecoderError where the port or the checkpoint cannot be used."""
    listener = _bind(settings.host, settings.port)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    try:
        decoder = Decoder.load(
            settings.model,
            device=settings.device,
            num_speculative_tokens=settings.num_speculative_tokens,
            max_context=settings.max_context,
            draft_vocab=settings.draft_vocab,
            draft_window=settings.draft_window,
            draft_context=settings.draft_context,
            quantize=settings.quantize,
            prefill_dtype=settings.prefill_dtype,
            native=False if need_plain_session(settings.plants) else None,
        )
        tokenizer = TextTokenizer.from_directory(Path(settings.model))
        source = plant_faults(decoder, settings.plants, seed=settings.plant_seed)
        serving = Serving(
            url=_url(listener),
            model=settings.served_name or settings.model,
            device=decoder.device,
            num_speculative_tokens=decoder.num_speculative_tokens if decoder.step_ms is None else AUTO,
            max_context=decoder.max_context,
        )
        model = ServedModel(
            names=_names(serving.model, settings.model),
            vocab_size=decoder.config.vocab_size,
            max_context=decoder.max_context,
            tokenizer=tokenizer,
        )
        stopped = asyncio.run(
            serve_decoder(source, model, listener, queue_limit=settings.queue_limit, on_ready=lambda: on_ready(serving))
        )
    finally:
        listener.close()
    if not stopped:  # still inside a long prefill: nothing worth waiting for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def serve_decoder(
    decoder: StepSource,
    model: ServedModel,
    listener: socket.socket,
    *,
    queue_limit: int,
    on_ready: Callable[[], None],
) -> bool:
    """Answers on a bound socket until SIGTERM or SIGINT; False where the decoder was still busy at the end."""
    logging.getLogger("aiohttp.server").addFilter(_in_one_line)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # else a line for every client that left
    counters = ServerCounters()
    worker = DecoderWorker(decoder, model.tokenizer, counters, queue_limit=queue_limit)
    app = DecoderServer(model, worker, counters).application()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await web.SockSite(runner, listener).start()
    except OSError as error:  # another process that also had the port bound came first
        host, port = listener.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None
    gc.collect()
    gc.freeze()  # the loaded model is no garbage: collections during a stream stay short
    on_ready()
    await stop.wait()
    stopped = await asyncio.to_thread(worker.stop, SHUTDOWN_S)
    await runner.cleanup()
    return stopped


def _in_one_line(record: logging.LogRecord) -> bool:
    """What is no HTTP is the client's fault: a line of it is enough, no traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, BadHttpMessage | web.RequestPayloadError):
        record.msg, record.args, record.exc_info = "refused what is no HTTP: %s", (" ".join(str(error).split()),), None
    return True


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> DecoderError:
    if error.errno == errno.EADDRINUSE:
        return DecoderError(f"port {port} on {host} is in use", "choose another --port, or 0 for any free one")
    return DecoderError(f"cannot listen on {host} port {port}: {error.strerror or error}")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _names(served: str, path: str) -> tuple[str, ...]:
    names: Sequence[str] = (served, path, Path(path).resolve().name)
    return tuple(dict.fromkeys(names))
