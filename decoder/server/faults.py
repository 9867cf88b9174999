"""Test plants on the way out: the steps of a decoder delayed, changed, dropped or cut, repeatably.

Each depends on the seed and the request alone. Faults inside the model are in plants_model.py.
"""

from __future__ import annotations

import random
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..cpu.model_faults import plant_in_model
from ..generate import Decoder, Step
from .fault_kinds import OUTPUT_PLANTS, parse_plants
from .worker import StepSource


def plant_faults(decoder: Decoder, texts: Sequence[str], *, seed: int) -> StepSource:
    """The decoder with the plants asked for; the decoder itself where there are none."""
    values = parse_plants(texts)
    for name, value in values.items():
        if name not in OUTPUT_PLANTS:
            plant_in_model(decoder, name, value, seed)
    outputs = {name: value for name, value in values.items() if name in OUTPUT_PLANTS}
    return PlantedDecoder(decoder, outputs, vocab_size=decoder.config.vocab_size, seed=seed) if outputs else decoder


def need_plain_session(texts: Sequence[str]) -> bool:
    """Whether these plants reach into the plain PyTorch model. Raises RequestError where they cannot be parsed."""
    return any(name not in OUTPUT_PLANTS and name != "reject_drafts" for name in parse_plants(texts))


class PlantedDecoder:
    """A decoder whose steps are tampered with on their way out."""

    def __init__(
        self,
        decoder: StepSource,
        plants: dict[str, float],
        *,
        vocab_size: int,
        seed: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._decoder, self._plants, self._vocab_size, self._seed, self._clock = (
            decoder,
            plants,
            vocab_size,
            seed,
            clock,
        )
        self.eos_token_ids = decoder.eos_token_ids

    def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, ignore_eos: bool, stop_token_ids: Sequence[int]
    ) -> Iterator[Step]:
        """The inner decoder's steps, tampered with."""
        truncate = self._plants.get("truncate")
        limit = max_tokens if truncate is None else min(max_tokens, int(truncate))
        inner_limit = limit
        if self._plants.get("drop_token"):
            inner_limit = limit * 4 + 64  # enough to fill the length up again; the window may end it sooner
        steps = self._decoder.generate(
            prompt_ids, max_tokens=inner_limit, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids
        )
        rng = random.Random(self._seed ^ zlib.crc32(array("q", prompt_ids).tobytes()))
        left = limit
        for step in self._delayed(iter(steps)):
            kept = self._tampered(step.token_ids, rng)[:left]
            if kept:
                left -= len(kept)
                yield replace(step, token_ids=tuple(kept), accepted=min(step.accepted, len(kept)))
            if left == 0:
                return

    def _delayed(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Each step after the prefill takes `step_delay` longer, spent busy, so that no timer rounds it."""
        fraction = self._plants.get("step_delay", 0.0)
        is_prefill = True
        while True:
            started = self._clock()
            step = next(steps, None)
            if step is None:
                return
            if fraction and not is_prefill:
                now = self._clock()
                until = now + fraction * (now - started)
                while self._clock() < until:
                    pass
            is_prefill = False
            yield step

    def _tampered(self, token_ids: Sequence[int], rng: random.Random) -> list[int]:
        wrong, dropped = self._plants.get("wrong_token", 0.0), self._plants.get("drop_token", 0.0)
        kept = []
        for token in token_ids:
            if dropped and rng.random() < dropped:
                continue
            replaced = bool(wrong) and rng.random() < wrong
            kept.append((token + 1 + rng.randrange(self._vocab_size - 1)) % self._vocab_size if replaced else token)
        return kept
