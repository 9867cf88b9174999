"""`python -m kernarc.decoder.training.evaluate MODEL`: how good and how fast, on held-out text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch
from tokenizers import Tokenizer

from ..draft_context import ALL
from ..generate import Decoder
from .bits import BitsPerByte, bits_per_byte, xz_bits_per_byte
from .card import add_scores
from .delta_rule import CHUNK
from .export import load_weights
from .heldout import HeldOutText, prompts
from .losses import LossFunctions
from .model import TrainingModel
from .progress import say
from .scores import loop_scores
from .shape import Shape
from .tokenizer import token_bytes

SAMPLE_PROMPT = 'def read_config(path):\n    """Read a configuration file and return its settings."""\n'


def measure_bits(folder: Path, ids: list[int], tokenizer: Tokenizer, length: int, most_windows: int) -> BitsPerByte:
    """Bits per byte in windows of `length` tokens, spread evenly, through the training model in fp32."""
    model = TrainingModel(Shape.from_directory(folder))
    load_weights(model, folder)
    stream, sizes = torch.tensor(ids), torch.from_numpy(token_bytes(tokenizer))
    length = min(length, (len(ids) - 1) // 64 * 64)
    stride = max(length, (len(ids) - length - 1) // max(1, most_windows - 1)) if most_windows > 1 else len(ids)
    with torch.no_grad():
        return bits_per_byte(model, LossFunctions(), stream, sizes, length=length, stride=stride, sequences=1)


@dataclass
class Acceptance:
    """Greedy speculative decoding of held-out prompts."""

    drafts: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accepted: Counter[int] | None = None

    @property
    def mean_length(self) -> float:
        """Tokens a step."""
        return self.tokens / self.steps

    def rate(self, draft: int) -> float:
        """Share of steps that kept the draft at this place (1 is the first)."""
        assert self.accepted is not None
        return sum(n for kept, n in self.accepted.items() if kept >= draft) / self.steps


@dataclass(frozen=True)
class Prompts:
    """Of each depth: how many prompts are decoded with drafts and looked at for loops, and how far they go on."""

    depths: list[int]
    count: int
    loop_count: int
    max_tokens: int
    seed: int


def measure_acceptance(decoder: Decoder, excerpts: list[list[int]], max_tokens: int, drafts: int) -> Acceptance:
    """Decodes each excerpt's continuation; steps cut short by max_tokens are not counted."""
    result = Acceptance(drafts, accepted=Counter())
    assert result.accepted is not None
    for excerpt in excerpts:
        steps = decoder.generate(excerpt, max_tokens=max_tokens, num_speculative_tokens=drafts, ignore_eos=True)
        next(steps)  # the prefill's token
        begun, left = perf_counter(), max_tokens - 1
        for step in steps:
            ended = perf_counter()
            if left > drafts:
                result.steps += 1
                result.tokens += len(step.token_ids)
                result.accepted[step.accepted] += 1
                result.seconds += ended - begun
            left -= len(step.token_ids)
            begun = ended
    return result


def acceptance_scores(decoder: Decoder, ids: list[int], plan: Prompts) -> dict[str, Any]:
    """Acceptance at several depths, printed as it goes."""
    scores: dict[str, Any] = {}
    for depth in plan.depths:
        excerpts = list(prompts(ids, plan.count, depth, plan.seed))
        found = measure_acceptance(decoder, excerpts, plan.max_tokens, 3)
        rates = [round(found.rate(n), 3) for n in (1, 2, 3)]
        say(
            f"depth {depth}: mean acceptance length {found.mean_length:.3f}, kept by draft {rates}, "
            f"{found.tokens / found.seconds:.0f} tokens/s in {found.steps} steps"
        )
        scores[f"mean acceptance length at depth {depth}, k = 3"] = round(found.mean_length, 3)
        scores[f"drafts kept at depth {depth}"] = dict(enumerate(rates, 1))
    return scores


def measure_loops(folder: Path, ids: list[int], plan: Prompts) -> dict[str, Any]:
    """Share of greedy continuations that the harness would void, at the depths asked for that are whole chunks."""
    model = TrainingModel(Shape.from_directory(folder))
    load_weights(model, folder)
    depths = [depth for depth in plan.depths if depth % CHUNK == 0]
    scores = loop_scores(model, torch.tensor(ids), depths, (plan.max_tokens,), plan.loop_count)
    for name, value in scores.items():
        say(f"{name}: {value}")
    return scores


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--library",
    type=click.Path(path_type=Path),
    help="a standard library's folder (default: the running interpreter's)",
)
@click.option("--windows", default=1000, help="at most this many windows for bits per byte")
@click.option("--length", default=8192, help="tokens a window")
@click.option("--depths", default="128,1024,4096")
@click.option("--prompts", "num_prompts", default=16, help="to decode with drafts, a depth")
@click.option("--loop-prompts", default=48, help="to look for loops, a depth")
@click.option("--max-tokens", default=128)
@click.option("--seed", default=0)
@click.option("--write-card", is_flag=True, help="put the scores into training.json and README.md")
def main(
    model: Path,
    library: Path | None,
    windows: int,
    length: int,
    depths: str,
    num_prompts: int,
    loop_prompts: int,
    max_tokens: int,
    seed: int,
    write_card: bool,
) -> None:
    """Command line."""
    plan = Prompts([int(depth) for depth in depths.split(",") if depth], num_prompts, loop_prompts, max_tokens, seed)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = HeldOutText.read(model, library)
    ids = text.ids(tokenizer)
    say(f"{len(ids):,} held-out tokens; {text.unchanged} of {text.listed} files are byte for byte those of training")
    xz = xz_bits_per_byte(text.texts)
    scores: dict[str, Any] = {}
    if windows:
        bits = measure_bits(model, ids, tokenizer, length, windows)
        positions = {f"{a}-{b}": round(value, 4) for (a, b), value in bits.by_position.items()}
        say(f"bits per byte {bits.overall:.4f} over {bits.predicted_bytes:,} bytes; `xz -9` on all of it {xz:.4f}")
        say("by position " + ", ".join(f"{k}: {v}" for k, v in positions.items()))
        scores = {
            f"bits per byte, windows of {length} tokens": round(bits.overall, 4),
            "bits per byte by position": positions,
            "bits per byte of `xz -9`": round(xz, 4),
        }
    if loop_prompts:
        scores |= measure_loops(model, ids, plan)
    decoder = Decoder.load(model, device="cpu", draft_window=ALL, draft_context=ALL)  # scores are the model's alone
    scores |= acceptance_scores(decoder, ids, plan)
    prompt = tokenizer.encode(SAMPLE_PROMPT).ids
    continued = [i for step in decoder.generate(prompt, max_tokens=120) for i in step.token_ids]
    say(tokenizer.decode(prompt + continued))
    if write_card:
        add_scores(model, scores)


if __name__ == "__main__":
    main()
