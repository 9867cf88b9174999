"""`python -m kernarc.decoder.training.unloop MODEL --corpus DIR --out DIR`: makes greedy text stop repeating itself.

A small model's greedy text soon runs in a loop, and a looping stream says nothing about a decoder. So its own
greedy continuations of training text are read back, and tokens that continue a loop are made unlikely:
sequence-level unlikelihood (Welleck et al. 2020), with the original model's distribution held everywhere else. Only
the last layer and the final norm are trained, so what that layer reads is kept from the rollout and a pass costs one
layer: minutes on one CPU core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from shutil import copytree
from time import monotonic
from typing import cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import STANDARD_LIBRARY, read_shard
from .export import load_weights, save_weights
from .layers import Layer, Norm, Tokens, rms_norm
from .model import TrainingModel
from .optimizer import Optimizer
from .rollout import greedy, repeated
from .shape import Shape
from .tokenizer import encode_stream

PROMPT, CONTINUATION = 128, 129  # 256 places where a next token is predicted
ANCHORS, ANCHOR_LENGTH = 24, 1024  # windows of real text on which the model is to stay as it was
DRIFT_WEIGHT = 3.0


def unlikelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log(1 - p(target))."""
    p = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].exp()
    losses: Tensor = -torch.log((1 - p).clamp_min(1e-4))
    return losses.mean()


def divergence(wanted: Tensor, logits: Tensor) -> Tensor:
    """Mean KL divergence of softmax(logits) from softmax(wanted), in nats a token."""
    kept = wanted.log_softmax(-1)
    divergences: Tensor = (kept.exp() * (kept - logits.log_softmax(-1))).sum(-1)
    return divergences.mean()


class Unlooper:
    """The model, of which the last layer and the final norm are trained, beside a copy of these two as they were."""

    def __init__(self, model: TrainingModel, anchors: Tensor) -> None:
        self.model = model
        self.layer = cast(Layer, model.model.layers[-1])
        model.requires_grad_(False)
        self.tuned = torch.nn.ModuleList([self.layer, model.model.norm])
        self.original = deepcopy(self.tuned)
        self.tuned.requires_grad_(True)
        self.optimizer = Optimizer(self.tuned, weight_decay=0.0)
        self.anchors = torch.stack([self._read_by_last_layer(window) for window in anchors])

    @torch.no_grad()
    def _read_by_last_layer(self, ids: Tensor) -> Tensor:
        tokens = Tokens.of(self.model.shape, 1, len(ids), ids.device)
        x = self.model.model.embed_tokens(ids).float()
        for layer in self.model.model.layers[:-1]:
            x = layer(x, tokens, self.model.kernels)
        return cast(Tensor, x)

    def logits(self, modules: torch.nn.ModuleList, read: Tensor) -> Tensor:
        """[sequences, length, hidden] into the last layer -> [sequences * length, vocab]."""
        layer, norm = modules
        tokens = Tokens.of(self.model.shape, read.shape[0], read.shape[1], read.device)
        x = layer(read.flatten(0, 1), tokens, self.model.kernels)
        return self.model.logits(rms_norm(x, cast(Norm, norm).weight, self.model.shape.rms_norm_eps))

    def losses(self, ids: Tensor, read: Tensor, loop: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """(divergence from the original model wherever no loop runs, unlikelihood of the tokens that loop)."""
        logits, marked = self.logits(self.tuned, read), loop[:, 1:].flatten()
        with torch.no_grad():
            wanted, wanted_anchors = self.logits(self.original, read), self.logits(self.original, anchors)
        drift = divergence(wanted[~marked], logits[~marked]) + divergence(
            wanted_anchors, self.logits(self.tuned, anchors)
        )
        targets = ids[:, 1:].flatten()
        looping = unlikelihood(logits[marked], targets[marked]) if bool(marked.any()) else drift * 0
        return drift, looping

    def round(self, prompts: Tensor, rates: Sequence[float], batch: int) -> tuple[float, float, float]:
        """Rolls out, then one pass a rate; (share of new tokens that loop, last divergence, last unlikelihood)."""
        ids, read = greedy(self.model, prompts, CONTINUATION)
        loop = repeated(ids, PROMPT)
        drift = looping = torch.zeros(())
        for rate in rates:
            for part in torch.split(torch.randperm(len(ids)), batch):
                anchors = self.anchors[torch.randperm(len(self.anchors))[:2]]
                drift, looping = self.losses(ids[part], read[part], loop[part], anchors)
                (DRIFT_WEIGHT * drift + looping).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step(rate)
        return float(loop[:, PROMPT:].float().mean()), float(drift.detach()), float(looping.detach())


def library_ids(corpus: Path, tokenizer: Tokenizer, files: int) -> Tensor:
    """Token ids of some of the standard library's training files."""
    documents = [d for path in sorted(corpus.glob("library-*.xz"))[1:3] for d in read_shard(path)]
    texts = [d.text for d in documents if d.origin == STANDARD_LIBRARY][:: max(1, len(documents) // files)]
    return torch.from_numpy(encode_stream(tokenizer, texts).astype(np.int64))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m kernarc.decoder.training.unloop", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    copytree(arguments.model, arguments.out, dirs_exist_ok=True)
    model = TrainingModel(Shape.from_directory(arguments.model))
    load_weights(model, arguments.model)
    stream = library_ids(arguments.corpus, Tokenizer.from_file(str(arguments.model / "tokenizer.json")), 400)

    def excerpts(count: int, length: int) -> Tensor:
        return stream[torch.randint(0, len(stream) - length, (count, 1)) + torch.arange(length)]

    started = monotonic()
    unlooper = Unlooper(model, excerpts(ANCHORS, ANCHOR_LENGTH))
    passes = arguments.rounds * arguments.epochs
    for n in range(arguments.rounds):
        rates = [arguments.rate * (1 - (n * arguments.epochs + e) / passes) for e in range(arguments.epochs)]
        share, drift, looping = unlooper.round(excerpts(arguments.prompts, PROMPT), rates, batch=8)
        sys.stdout.write(
            f"round {n}: {share:.1%} of tokens loop, divergence {drift:.3f}, unlikelihood {looping:.3f}, "
            f"{monotonic() - started:.0f} s\n"
        )
        sys.stdout.flush()
        save_weights(model, arguments.out)


if __name__ == "__main__":
    main()
