"""Nothing leaks: a small random model decodes thousands of steps on a card while memory is watched.

`python -m kernarc.decoder.bench.soak [--steps 10000] [--layers 8]`. After a warm-up over every prompt length and
draft count used, the card's allocated and reserved bytes must stay as they are to the byte, and the process may not
grow by more than RSS_SLACK_BYTES. Prints a line a tenth of the way; exit code 1 where something grew.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..checkpoint.config import ModelConfig
from ..checkpoint.shapes import read_shape
from ..cuda.kernels.products import CudaProducts
from ..cuda.session import CudaSession
from .command_line import exit_with, require_card
from .random_cuda_weights import RandomWeights

RSS_SLACK_BYTES = 32 << 20  # allocator arenas settle late; a leak of a few bytes a step would be 10,000 times that
PROMPTS = (5, 300, 64, 1025)
DRAFTS = (3, 8, 0, 1, 5)
STEPS_A_PROMPT = 100


class Steps(Protocol):
    """What is soaked."""

    def prefill(self, prompt_ids: list[int]) -> int:
        """Read a prompt."""
        ...

    def step(self, num_drafts: int) -> tuple[list[int], int]:
        """One step."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes held at one moment."""

    allocated: int
    reserved: int
    resident: int

    @classmethod
    def now(cls) -> "Memory":
        """Of this process and the current card."""
        torch.cuda.synchronize()
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        return cls(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pages * 4096)


def growth(before: Memory, after: Memory) -> str | None:
    """What has grown, in words; None where nothing has."""
    grown = []
    for name in ("allocated", "reserved"):
        difference = getattr(after, name) - getattr(before, name)
        if difference > 0:
            grown.append(f"{name} on the card by {difference:,} bytes")
    if after.resident - before.resident > RSS_SLACK_BYTES:
        grown.append(f"the process by {after.resident - before.resident:,} bytes")
    return ", ".join(grown) or None


def soak(session: Steps, steps: int, memory: Callable[[], Memory]) -> Iterator[tuple[int, Memory]]:
    """(steps done, memory held) after a warm-up and then ten times on the way to `steps`."""
    for _ in range(2):  # the second time, what the first one left behind is in use again
        for prompt in PROMPTS:
            for drafts in DRAFTS:
                session.prefill([7] * prompt)
                for _ in range(24):  # enough without drafts for the MTP head to fall behind
                    session.step(drafts)
    yield 0, memory()
    done = 0
    while done < steps:
        tenth = min(steps, done + max(1, steps // 10))
        while done < tenth:
            turn = done // STEPS_A_PROMPT
            if done % STEPS_A_PROMPT == 0:
                session.prefill([7] * PROMPTS[turn % len(PROMPTS)])
            session.step(DRAFTS[turn % len(DRAFTS)])
            done += 1
        yield done, memory()


def main(arguments: list[str]) -> int:
    """Soak a model of the tiny shape; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args(arguments)
    config = ModelConfig.from_dict(read_shape("tiny"))
    layers = (config.layer_types * options.layers)[: options.layers]
    config = replace(config, num_hidden_layers=options.layers, layer_types=layers)
    card = require_card()
    weights = RandomWeights(config, card).model()
    window = max(PROMPTS) + 9 * (STEPS_A_PROMPT + 1)
    session = CudaSession(config, weights, CudaProducts(weights.linears(), card), max_context=window, device=card)
    for drafts in DRAFTS:
        session.warm_up(drafts)
    before, grown = None, None
    for done, memory in soak(session, options.steps, Memory.now):
        before = before or memory
        grown = growth(before, memory)
        sizes = f"{memory.allocated:,} allocated, {memory.reserved:,} reserved, {memory.resident:,} resident"
        print(f"{done:6} steps: {sizes}", flush=True)
    print(f"LEAK: {grown}" if grown else "nothing grew", flush=True)
    return 1 if grown else 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
