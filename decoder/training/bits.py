"""Bits per byte of held-out text, whole and by position, beside `xz -9` on the same text."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

import torch
from torch import Tensor

from .layers import Tokens
from .losses import LossFunctions
from .model import TrainingModel
from .streams import windows

POSITION_BOUNDS = (0, 256, 512, 1024, 2048, 4096, 6144, 8192)


@dataclass(frozen=True)
class BitsPerByte:
    """Over all predicted tokens, and by the token's position in its window: {(first, end): bits per byte}."""

    overall: float
    by_position: dict[tuple[int, int], float]
    predicted_bytes: int


def xz_bits_per_byte(texts: Sequence[str]) -> float:
    """What `xz -9` needs for the same texts, one after the other in one stream."""
    raw = "".join(texts).encode()
    return 8 * len(lzma.compress(raw, preset=9)) / len(raw)


def bits_per_byte(
    model: TrainingModel,
    functions: LossFunctions,
    held_out: Tensor,
    sizes: Tensor,
    *,
    length: int,
    stride: int,
    sequences: int,
) -> BitsPerByte:
    """Reads `held_out` [tokens] in windows of `length` tokens, `stride` apart, each from an empty state.

    sizes: [vocab] bytes a token stands for (the end-of-text token: none). `sequences` windows are read at a time; the
    last group is filled up with the first window, not counted twice. Call under no_grad unless kernels are compiled.
    """
    every = windows(held_out, length, stride)
    nats = torch.zeros(length, dtype=torch.float64, device=held_out.device)
    sizes_at = torch.zeros_like(nats)
    tokens = Tokens.of(model.shape, sequences, length, held_out.device)
    for first in range(0, len(every), sequences):
        group = every[first : first + sequences]
        filled = torch.cat((group, every[:1].expand(sequences - len(group), -1)))
        hidden = model.hidden(filled[:, :-1].flatten(), tokens)
        loss = functions.next_token(hidden, model.lm_head.weight, filled[:, 1:].flatten())[0].detach()
        nats += loss.view(sequences, length)[: len(group)].double().sum(0)
        sizes_at += sizes[group[:, 1:]].double().sum(0)
    by_position = {}
    for begin, end in pairwise(b for b in POSITION_BOUNDS if b <= length):
        by_position[(begin, end)] = float(nats[begin:end].sum() / sizes_at[begin:end].sum() / log(2))
    return BitsPerByte(float(nats.sum() / sizes_at.sum() / log(2)), by_position, int(sizes_at.sum()))
