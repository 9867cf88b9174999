"""One prompt continued on a terminal: text as it decodes, then how fast and how well the drafts did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint.tokenizer import TextTokenizer
from .errors import RequestError
from .generate import Decoder
from .streaming_text import TextStream

IDS_PREFIX = "ids:"


@dataclass(frozen=True, slots=True)
class Continuation:
    """What was generated. Speeds count from the first token on, so prefill is not in them."""

    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    ttft_ms: float
    tokens_per_second: float | None
    tokens_per_step: float | None
    acceptance_rate: float | None
    interrupted: bool

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{len(self.token_ids)} tokens after {self.prompt_tokens}", f"first after {self.ttft_ms:.0f} ms"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.0f} tokens/s")
        if self.acceptance_rate is not None:
            parts.append(f"{self.tokens_per_step:.2f} tokens a step ({self.acceptance_rate:.0%} of drafts accepted)")
        return ", ".join(parts) + (" (interrupted)" if self.interrupted else "")


def prompt_token_ids(prompt: str, tokenizer: TextTokenizer | None) -> list[int]:
    """Ids of a text, or those written as `ids:1,2,3`. Raises RequestError."""
    if prompt.startswith(IDS_PREFIX):
        try:
            return [int(item) for item in prompt.removeprefix(IDS_PREFIX).split(",")]
        except ValueError:
            raise RequestError(f"{prompt!r} is not a list of ids", "write it as ids:1,2,3") from None
    if tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer, so it takes no text", "write the prompt as ids:1,2,3")
    return tokenizer.encode(prompt, add_special_tokens=True)


def continue_prompt(
    model_dir: Path,
    prompt: str,
    *,
    max_tokens: int | None,
    show: Callable[[str], None],
    **options: Any,
) -> Continuation:
    """Loads a checkpoint and continues one prompt, calling show with each step's text (its ids without a tokenizer).

    Ctrl-C ends it and keeps what was generated. options: how to load, those of Decoder.load.
    """
    tokenizer = TextTokenizer.from_directory(model_dir)
    prompt_ids = prompt_token_ids(prompt, tokenizer)
    decoder = Decoder.load(model_dir, **options)
    stream = TextStream(tokenizer, silent_ids=decoder.eos_token_ids)
    token_ids: list[int] = []
    pieces: list[str] = []
    drafted = accepted = first_tokens = 0
    started = first_at = last_at = time.perf_counter()
    steps = 0
    interrupted = False
    try:
        for step in decoder.generate(prompt_ids, max_tokens=max_tokens):
            last_at = time.perf_counter()
            if not steps:
                first_at, first_tokens = last_at, len(step.token_ids)
            steps += 1
            drafted, accepted = drafted + step.drafted, accepted + step.accepted
            pieces.append(stream.push(step.token_ids).text)
            show(pieces[-1] if tokenizer else ("," if token_ids else "") + ",".join(map(str, step.token_ids)))
            token_ids += step.token_ids
    except KeyboardInterrupt:
        interrupted = True
    pieces.append(stream.finish()[0])
    show(pieces[-1])
    later = len(token_ids) - first_tokens
    return Continuation(
        prompt_tokens=len(prompt_ids),
        token_ids=tuple(token_ids),
        text="".join(pieces),
        ttft_ms=(first_at - started) * 1e3,
        tokens_per_second=later / (last_at - first_at) if later and last_at > first_at else None,
        tokens_per_step=later / (steps - 1) if steps > 1 else None,
        acceptance_rate=accepted / drafted if drafted else None,
        interrupted=interrupted,
    )
