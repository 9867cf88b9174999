"""A server in this process over a decoder whose steps are known exactly, and a small byte-level tokenizer."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from kernarc.decoder.checkpoint.tokenizer import TextTokenizer
from kernarc.decoder.generate import Step
from kernarc.decoder.server.metrics_text import ServerCounters
from kernarc.decoder.server.request import ServedModel
from kernarc.decoder.server.server import DecoderServer
from kernarc.decoder.server.worker import DecoderWorker, StepSource
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = 0
TEXT = [
    "a café in Zürich: 日本語 and 🙂 emoji 👩‍👩‍👧",
    "def main():\n    return 'naïve'\n",
    "    indent\n\t\tünïcödé " * 3,
]


def small_tokenizer() -> Tokenizer:
    """Byte-level BPE whose every character beyond ASCII takes several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.encode("ascii", "ignore").decode() for text in TEXT], trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    return tokenizer


@dataclass
class ScriptedDecoder:
    """Emits the given steps whatever the prompt. A gate, where given, is waited for before every step."""

    steps: Sequence[Sequence[int]]
    eos_token_ids: frozenset[int] = frozenset({EOS})
    gate: threading.Semaphore | None = None
    fail_at: int | None = None
    prompts: list[list[int]] = field(default_factory=list)
    steps_taken: int = 0
    closed: int = 0

    def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, ignore_eos: bool, stop_token_ids: Sequence[int]
    ) -> Iterator[Step]:
        """As the real decoder: trimmed at a stop token and at max_tokens."""
        self.prompts.append(list(prompt_ids))
        stops = set(stop_token_ids) | (set() if ignore_eos else self.eos_token_ids)
        left = max_tokens
        try:
            for index, script in enumerate(self.steps):
                if self.gate is not None:
                    self.gate.acquire()
                if index == self.fail_at:
                    raise RuntimeError("planted failure")
                self.steps_taken += 1
                kept = list(script)[:left]
                ends = [place for place, token in enumerate(kept) if token in stops]
                kept = kept[: ends[0] + 1] if ends else kept
                left -= len(kept)
                yield Step(tuple(kept), 3 if index else 0, min(len(script) - 1, len(kept)))
                if ends or left == 0:
                    return
        finally:
            self.closed += 1


class LiveServer:
    """The server on a free port, in a thread of its own; a context."""

    def __init__(
        self,
        decoder: StepSource,
        *,
        tokenizer: TextTokenizer | None = None,
        vocab_size: int = 512,
        max_context: int = 4096,
        queue_limit: int = 1,
    ) -> None:
        self.counters = ServerCounters()
        self.worker = DecoderWorker(decoder, tokenizer, self.counters, queue_limit=queue_limit)
        self.model = ServedModel(("scripted",), vocab_size, max_context, tokenizer)
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self.worker.stop(1.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def start() -> None:
            app = DecoderServer(self.model, self.worker, self.counters).application()
            self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.port = self._runner.addresses[0][1]

        self._loop.run_until_complete(start())
        self._ready.set()
        self._loop.run_forever()

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of one request; body as JSON unless bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"} if data is not None else {})
        response = connection.getresponse()
        answer = response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        connection.close()
        return answer

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """(status, parsed JSON) of a POST."""
        status, _, answer = self.request("POST", path, body)
        return status, json.loads(answer)

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """Every event of a stream that must end with [DONE]."""
        status, headers, answer = self.request("POST", path, {"stream": True, **body})
        assert status == 200, answer
        assert headers["content-type"].startswith("text/event-stream")
        events = answer.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)
