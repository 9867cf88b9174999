"""Nothing leaks: a small random model decodes thousands of steps on a card while memory is watched.

After a warm-up over every prompt length and draft count used, the card's allocated and reserved bytes must stay as they
are to the byte, and the process may not grow by more than RSS_SLACK_BYTES. `-m slow -s` prints what is held a tenth of
the way. The soak's own rule needs no card: what grows is named, what stays is not, every kind of step is warmed up.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import pytest
import torch
from kernarc.decoder.bench.random_cuda_weights import RandomWeights
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.checkpoint.shapes import read_shape
from kernarc.decoder.cuda.kernels.products import CudaProducts
from kernarc.decoder.cuda.session import CudaSession

STEPS = 10_000
LAYERS = 8
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


@pytest.mark.gpu
@pytest.mark.slow
@torch.inference_mode()
def test_nothing_grows_on_a_card() -> None:
    config = ModelConfig.from_dict(read_shape("tiny"))
    layers = (config.layer_types * LAYERS)[:LAYERS]
    config = replace(config, num_hidden_layers=LAYERS, layer_types=layers)
    card = torch.device("cuda", torch.cuda.current_device())
    weights = RandomWeights(config, card).model()
    window = max(PROMPTS) + 9 * (STEPS_A_PROMPT + 1)
    session = CudaSession(config, weights, CudaProducts(weights.linears(), card), max_context=window, device=card)
    for drafts in DRAFTS:
        session.warm_up(drafts)
    before, grown = None, None
    for done, memory in soak(session, STEPS, Memory.now):
        before = before or memory
        grown = growth(before, memory)
        sizes = f"{memory.allocated:,} allocated, {memory.reserved:,} reserved, {memory.resident:,} resident"
        sys.stdout.write(f"{done:6} steps: {sizes}\n")
    assert grown is None


class Leaky:
    """A session that keeps `leak` bytes a step."""

    def __init__(self, leak: int) -> None:
        self.leak, self.held, self.steps = leak, 1000, 0
        self.seen: set[tuple[int, int]] = set()
        self.prompt = 0

    def prefill(self, prompt_ids: list[int]) -> int:
        self.prompt = len(prompt_ids)
        return 0

    def step(self, num_drafts: int) -> tuple[list[int], int]:
        self.steps += 1
        self.seen.add((self.prompt, num_drafts))
        self.held += self.leak
        return [0], 0


def run(leak: int) -> list[tuple[int, Memory]]:
    session = Leaky(leak)
    measured = []
    for done, memory in soak(session, 1000, lambda: Memory(session.held, 5000, 70)):
        if done == 0:
            assert session.seen == {(prompt, drafts) for prompt in PROMPTS for drafts in DRAFTS}
        measured.append((done, memory))
    return measured


def test_a_leak_is_named_with_its_size() -> None:
    measured = run(leak=8)
    assert [done for done, _ in measured] == [0, *range(100, 1001, 100)]
    assert growth(measured[0][1], measured[-1][1]) == "allocated on the card by 8,000 bytes"


def test_nothing_grows_without_one() -> None:
    measured = run(leak=0)
    assert growth(measured[0][1], measured[-1][1]) is None


def test_the_process_may_settle_but_not_grow() -> None:
    before = Memory(10, 20, 1 << 30)
    assert growth(before, Memory(10, 20, (1 << 30) + RSS_SLACK_BYTES)) is None
    assert growth(before, Memory(10, 25, (1 << 30) + RSS_SLACK_BYTES + 1)) == (
        f"reserved on the card by 5 bytes, the process by {RSS_SLACK_BYTES + 1:,} bytes"
    )
