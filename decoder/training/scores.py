"""The scores that a training run ends with, for the card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .bits import bits_per_byte, xz_bits_per_byte
from .export import load_weights
from .loops import is_loop
from .model import TrainingModel
from .progress import say
from .rollout import Rollout
from .trainer import Trainer


def loop_rates(model: TrainingModel, excerpts: Tensor, new_tokens: Sequence[int]) -> dict[int, float]:
    """Share of greedy continuations of [n, depth] prompts that the harness would void, by their number of tokens."""
    depth = excerpts.shape[1]
    outputs = Rollout(model, len(excerpts), depth, max(new_tokens)).run(excerpts)[:, depth:]
    return {new: float(is_loop(outputs[:, :new]).float().mean()) for new in new_tokens}


def random_excerpts(stream: Tensor, count: int, length: int, seed: int = 0) -> Tensor:
    """[count, length] ids from seeded places of a stream."""
    starts = torch.randint(0, len(stream) - length, (count, 1), generator=torch.Generator().manual_seed(seed))
    return stream[starts.to(stream.device) + torch.arange(length, device=stream.device)].long()


def loop_scores(
    model: TrainingModel, stream: Tensor, depths: Sequence[int], new_tokens: Sequence[int], count: int
) -> dict[str, Any]:
    """Loop rates of `count` places of a stream at each depth that it is long enough for."""
    found = {
        depth: loop_rates(model, random_excerpts(stream, count, depth), new_tokens)
        for depth in depths
        if len(stream) > depth
    }
    return {
        f"greedy text that is mostly a loop, {new} tokens, {count} prompts a depth": {
            depth: round(rates[new], 4) for depth, rates in found.items()
        }
        for new in new_tokens
    }


def text_scores(trainer: Trainer, texts: Sequence[str]) -> dict[str, Any]:
    """Bits per byte in long windows, whole and by position, beside `xz -9`; agreement by draft."""
    plan = trainer.plan
    bits = bits_per_byte(
        trainer.model,
        trainer.losses,
        trainer.streams.held_out,
        trainer.sizes,
        length=plan.long_length,
        stride=max(1, plan.long_length // 4),
        sequences=plan.tokens_per_step // plan.long_length,
    )
    report = trainer.held_out_report()
    positions = {f"{begin}-{end}": round(value, 4) for (begin, end), value in bits.by_position.items()}
    return {
        f"bits per byte, windows of {plan.long_length} tokens": round(bits.overall, 4),
        "bits per byte by position": positions,
        "bits per byte of `xz -9`": round(xz_bits_per_byte(texts), 4),
        "greedy agreement of each draft with the main model": {
            k: round(v, 4) for k, v in report.items() if k.startswith("draft")
        },
        "mean acceptance length on held-out text, k = 3": round(report["expected_acceptance_length"], 3),
    }


def run_scores(trainer: Trainer, folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    """All scores of the weights that were saved, in bf16, printed as they come."""
    load_weights(trainer.model, folder)
    new_tokens = (128, 256) if trainer.device == "cuda" else (64,)
    depths, count = ((128, 1024, 4096), 96) if trainer.device == "cuda" else ((128,), 8)
    scores = loop_scores(trainer.model, trainer.streams.held_out, depths, new_tokens, count)
    scores |= text_scores(trainer, texts)
    for name, value in scores.items():
        say(f"{name}: {value}")
    return scores
