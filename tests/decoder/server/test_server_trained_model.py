"""The shipped model behind the real server: text of a stream equals a full decode by the tokenizers library."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from kernarc.decoder.checkpoint.tokenizer import TextTokenizer
from kernarc.decoder.generate import Decoder
from tokenizers import Tokenizer

from ...fakes.draft_oracle import torch_session
from ...fakes.live_server import LiveServer
from .test_server import wait_for

MODEL = Path(str(files("kernarc.configs"))) / "models" / "python-7m"
PROMPT = "# -*- coding: utf-8 -*-\nNAMES = {'é': 'eacute', '日本': "


def test_a_client_that_leaves_during_a_long_prefill_frees_the_decoder(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder.load(MODEL, device="cpu", native=native)
    pieces = []
    owner: Any = decoder.session if native else torch_session(decoder).model
    name = "_read" if native else "forward"
    real = getattr(owner, name)

    def watched(first: Any, *rest: Any) -> Any:
        pieces.append(rest[0] if native else len(first))
        return real(first, *rest)

    monkeypatch.setattr(owner, name, watched)
    length = 12_000
    with LiveServer(decoder, vocab_size=decoder.config.vocab_size, max_context=decoder.max_context) as server:
        body = json.dumps({"prompt": [7] * length}).encode()
        with server.connect() as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(body) + body)
            wait_for(lambda: len(pieces) > 0)
        wait_for(lambda: server.counters.requests == {"cancelled": 1}, limit_s=30)
        assert sum(pieces) < length / 2
        assert server.post("/v1/completions", prompt=[1], max_tokens=2)[0] == 200


@pytest.mark.parametrize("drafts", [0, 3])
def test_streamed_text_is_the_full_decode(drafts: int) -> None:
    library = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    decoder = Decoder.load(MODEL, device="cpu", num_speculative_tokens=drafts, max_context=512)
    tokenizer = TextTokenizer.from_directory(MODEL)
    vocab_size = decoder.config.vocab_size
    with LiveServer(decoder, tokenizer=tokenizer, vocab_size=vocab_size, max_context=512) as server:
        events = server.stream(prompt=PROMPT, max_tokens=120, ignore_eos=True, return_token_ids=True)
        choices = [event["choices"][0] for event in events]
        ids = [token for choice in choices for token in choice["token_ids"]]
        text = "".join(choice["text"] for choice in choices)
        assert len(ids) == 120
        assert text == library.decode(ids)
        stop = text[40:44]
        _, stopped = server.post("/v1/completions", prompt=PROMPT, max_tokens=120, ignore_eos=True, stop=stop)
        assert stopped["choices"][0]["text"] == text[: text.index(stop)]
        again = server.post("/v1/completions", prompt=library.encode(PROMPT).ids, max_tokens=120, ignore_eos=True)[1]
        assert again["choices"][0]["text"] == text
