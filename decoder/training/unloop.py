"""`python -m kernarc.decoder.training.unloop MODEL --corpus DIR --out DIR`: makes greedy text stop repeating itself.

A small model's greedy text soon runs in a loop, and a looping stream says nothing about a decoder. So its own greedy
continuations of training text are read back, and tokens that continue a loop are made unlikely: sequence-level
unlikelihood (Welleck et al. 2020). Only the last layer and the final norm are trained, so what that layer reads is
kept from the rollout and a pass costs one layer: minutes on one CPU core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from shutil import copytree
from time import monotonic
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import STANDARD_LIBRARY, read_shard
from .export import load_weights, save_weights
from .layers import Layer, Tokens, rms_norm
from .model import TrainingModel
from .optimizer import Optimizer
from .rollout import greedy, repeated
from .shape import Shape
from .tokenizer import encode_stream

PROMPT, CONTINUATION = 128, 129  # 256 places where a next token is predicted


def unlikelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log(1 - p(target))."""
    p = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].exp()
    return -torch.log((1 - p).clamp_min(1e-4)).mean()


class Unlooper:
    """The model, of which the last layer and the final norm are trained."""

    def __init__(self, model: TrainingModel, peak: float) -> None:
        self.model, self.peak = model, peak
        self.layer = cast(Layer, model.model.layers[-1])
        model.requires_grad_(False)
        self.tuned = torch.nn.ModuleList([self.layer, model.model.norm])
        self.tuned.requires_grad_(True)
        self.optimizer = Optimizer(self.tuned, weight_decay=0.0)

    def losses(self, ids: Tensor, read: Tensor, loop: Tensor) -> tuple[Tensor, Tensor]:
        """(cross-entropy of the prompts' tokens, unlikelihood of the tokens that loop)."""
        sequences, length = read.shape[:2]
        tokens = Tokens.of(self.model.shape, sequences, length, ids.device)
        x = self.layer(read.flatten(0, 1), tokens, self.model.kernels)
        hidden = rms_norm(x, self.model.model.norm.weight, self.model.shape.rms_norm_eps).view(read.shape)
        targets = ids[:, 1:]
        read_text = self.model.logits(hidden[:, : PROMPT - 1].flatten(0, 1))
        text = F.cross_entropy(read_text, targets[:, : PROMPT - 1].flatten())
        marked = loop[:, 1:]
        looping = unlikelihood(self.model.logits(hidden[marked]), targets[marked]) if bool(marked.any()) else text * 0
        return text, looping

    def round(self, prompts: Tensor, *, epochs: int, batch: int, rate: float) -> tuple[float, float, float]:
        """Rolls out and trains; (share of continuation tokens that loop, last cross-entropy, last unlikelihood)."""
        ids, read = greedy(self.model, prompts, CONTINUATION)
        loop = repeated(ids, PROMPT)
        text = looping = torch.zeros(())
        for _ in range(epochs):
            for part in torch.split(torch.randperm(len(ids)), batch):
                text, looping = self.losses(ids[part], read[part], loop[part])
                (text + looping).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step(rate)
        return float(loop[:, PROMPT:].float().mean()), float(text.detach()), float(looping.detach())


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    copytree(arguments.model, arguments.out, dirs_exist_ok=True)
    model = TrainingModel(Shape.from_directory(arguments.model))
    load_weights(model, arguments.model)
    stream = library_ids(arguments.corpus, Tokenizer.from_file(str(arguments.model / "tokenizer.json")), 400)
    unlooper = Unlooper(model, arguments.rate)
    started = monotonic()
    for n in range(arguments.rounds):
        starts = torch.randint(0, len(stream) - PROMPT, (arguments.prompts, 1))
        prompts = stream[starts + torch.arange(PROMPT)]
        rate = arguments.rate * (1 - n / arguments.rounds)
        share, text, looping = unlooper.round(prompts, epochs=arguments.epochs, batch=8, rate=rate)
        sys.stdout.write(
            f"round {n}: {share:.1%} of tokens loop, cross-entropy {text:.3f}, unlikelihood {looping:.3f}, "
            f"{monotonic() - started:.0f} s\n"
        )
        sys.stdout.flush()
        save_weights(model, arguments.out)


if __name__ == "__main__":
    main()
