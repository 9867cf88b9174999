"""Structured checkpoints: any shape, a known greedy output, a chosen acceptance. No download, every engine runs them.

The sublayers' outputs are small, so the residual stream stays close to the token's embedding E. Its first half codes
the token the model emits next, its second half the token the MTP head drafts:

    lm_head[next[i], :H/2] = E[i, :H/2] / √H        final norm's second half is 1 + w = 0
    lm_head[drafted[i], H/2:] = E[i, H/2:] / √H     mtp.norm's first half is 1 + w = 0

`next` is one cycle over the vocabulary; `drafted` equals it except on a fraction 1 − p of the tokens, so the mean
acceptance length at k drafts is 1 + p + … + p^k. Logit margins are huge: this proves little about numerics.

Real models emit a small part of their vocabulary most of the time. With `emitted` = E the cycle runs over E tokens
chosen at random; every other token carries the embedding of one of them, so what follows it, emitted or drafted, lies
among the E too. Rows of lm_head that nothing emits are random like the others, and draft_vocab.json lists the E ids.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .config import ModelConfig
from .draft_vocabulary import FILE_NAME as DRAFT_VOCABULARY
from .draft_vocabulary import DraftVocabulary
from .layout import Role, TensorSpec, checkpoint_tensors
from .new_directory import new_directory
from .random_weights import NormalBits, from_bf16, to_bf16
from .shapes import fp8_config, read_shape
from .shard_writer import NewTensor, write_shards

OUTPUT_GAIN = 0.02
NOBODY = -1
SINGLE_FILE_BYTES = 1 << 30
RECIPE = "structured.json"
NEXT_TOKENS = "next_tokens.npy"  # int64 [V]: the greedy token after each, for the output check
Bits = NDArray[np.uint16]


@dataclass(frozen=True)
class TokenCycle:
    """next[i] and drafted[i] for every token i, and the token stands_for[i] whose embedding it carries.

    On the emitted ids `next` and `drafted` are permutations and stands_for is the identity; any other token does as
    the one that it stands for.
    """

    next: NDArray[np.int64]
    drafted: NDArray[np.int64]
    stands_for: NDArray[np.int64]

    @classmethod
    def make(cls, vocab_size: int, acceptance: float, seed: int, emitted: int | None = None) -> "TokenCycle":
        """One cycle over `emitted` tokens, the whole vocabulary unless given; round((1 − acceptance)·E) of them draft
        another's successor instead."""
        if not 0.0 <= acceptance <= 1.0:
            raise CheckpointError(f"acceptance {acceptance} is not a probability", "choose a value from 0 to 1")
        if emitted is not None and not 2 <= emitted <= vocab_size:
            raise CheckpointError(f"{emitted} emitted tokens, expected 2 … {vocab_size}, the vocabulary")
        rng = np.random.default_rng([seed, 1])
        order = rng.permutation(vocab_size)[:emitted]
        successor = np.empty(vocab_size, np.int64)
        successor[order] = np.roll(order, -1)
        wrong = rng.permutation(order if emitted else vocab_size)[: round((1.0 - acceptance) * len(order))]
        drafted = successor.copy()
        if len(wrong) > 1:  # a single token cannot draft another's successor: rows of lm_head are used once
            drafted[wrong] = successor[np.roll(wrong, 1)]
        stands_for = order[rng.integers(len(order), size=vocab_size)]
        stands_for[order] = order
        return cls(successor[stands_for], drafted[stands_for], stands_for)

    @classmethod
    def of_checkpoint(cls, model_dir: Path, vocab_size: int) -> "TokenCycle":
        """That of a structured checkpoint, from its structured.json. Raises CheckpointError where it is none."""
        try:
            recipe = json.loads((model_dir / RECIPE).read_text(encoding="utf-8"))
            return cls.make(vocab_size, recipe["acceptance"], recipe["seed"], recipe.get("emitted"))
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{model_dir} is no structured checkpoint: {RECIPE} {type(error).__name__}", "make one with model synth"
            ) from error

    @property
    def emitted_ids(self) -> NDArray[np.int64]:
        """The tokens that an output holds, ascending."""
        return np.flatnonzero(self.stands_for == np.arange(len(self.stands_for)))

    def continuation(self, token: int, length: int) -> list[int]:
        """The greedy output after a prompt that ends in `token`."""
        output = []
        for _ in range(length):
            token = int(self.next[token])
            output.append(token)
        return output


def write_structured_checkpoint(
    shape: str,
    out: Path,
    *,
    acceptance: float = 0.87,
    fp8: bool = False,
    seed: int = 0,
    emitted: int | None = None,
    workers: int | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> int:
    """Writes a checkpoint of `shape` (tiny, 27b or a config.json's path) to the new directory `out`; returns its bytes.

    emitted: how many tokens its outputs and drafts keep to, listed in a draft_vocab.json; the whole vocabulary unless
    given.
    Streams tensor by tensor: memory is the embedding table (2·V·H bytes) plus a few blocks. The directory appears
    under its name only when complete. on_bytes(done, total) reports progress. Raises CheckpointError.
    """
    raw = read_shape(shape)
    config = ModelConfig.from_dict(raw)
    raw = fp8_config(raw, config) if fp8 else raw
    cycle = TokenCycle.make(config.vocab_size, acceptance, seed, emitted)
    tensors = structured_tensors(config, cycle, seed=seed, fp8=fp8)
    with new_directory(out) as partial:
        total = write_shards(partial, tensors, workers=workers or min(16, os.cpu_count() or 1), on_bytes=on_bytes)
        recipe = {"shape": shape, "acceptance": acceptance, "seed": seed, "fp8": fp8}
        if emitted is not None:
            recipe["emitted"] = emitted
            ids = tuple(map(int, cycle.emitted_ids))
            DraftVocabulary(ids, f"every token that this structured checkpoint emits (seed {seed})").write(
                partial / DRAFT_VOCABULARY
            )
        for name, content in (("config.json", raw), (RECIPE, recipe)):
            (partial / name).write_text(json.dumps(content, indent=2) + "\n")
        np.save(partial / NEXT_TOKENS, cycle.next)
    return total


def structured_tensors(config: ModelConfig, cycle: TokenCycle, *, seed: int, fp8: bool) -> list[NewTensor]:
    """Every tensor of the checkpoint with the function that makes its rows; nothing is made yet."""
    if config.tie_word_embeddings:
        raise CheckpointError(
            "a structured checkpoint needs its own lm_head", 'set "tie_word_embeddings": false in the configuration'
        )
    if config.hidden_size % 2 or not config.has_mtp:
        raise CheckpointError("a structured checkpoint needs an even hidden size and one MTP layer")
    specs = checkpoint_tensors(config)
    sharded = sum(spec.elements * (1 if fp8 and spec.is_fp8_linear else 2) for spec in specs) > SINGLE_FILE_BYTES
    maker = _RowMaker(config, cycle, seed)
    tensors = []
    for spec in specs:
        file = spec.shard if sharded else "model"
        if fp8 and spec.is_fp8_linear:
            tensors += maker.fp8_pair(spec, file)
        else:
            tensors.append(NewTensor(spec.name, "BF16", spec.shape, file, maker.rows(spec)))
    return tensors


class _RowMaker:
    """Makes rows of each role. The embedding table is made at first use and kept: lm_head is a shuffle of it."""

    def __init__(self, config: ModelConfig, cycle: TokenCycle, seed: int) -> None:
        self.hidden, self.vocab, self.seed = config.hidden_size, config.vocab_size, seed
        ids = cycle.emitted_ids
        self.place = np.searchsorted(ids, cycle.stands_for)  # token → its row of the embedding table
        # lm_head row → the row of that table that codes it, for emission and for drafts, or NOBODY
        self.emits, self.drafts = (_inverse(which[ids], self.vocab) for which in (cycle.next, cycle.drafted))
        self.embedding = NormalBits(1.0).table((len(ids), config.hidden_size), (seed, 2))

    def rows(self, spec: TensorSpec) -> Callable[[int, int], NDArray[Any]]:
        """rows(first, last) of a bf16 tensor."""
        match spec.role:
            case Role.EMBEDDING:
                return lambda first, last: self.embedding()[self.place[first:last]]
            case Role.HEAD:
                return self._head_rows
            case Role.MTP_INPUT:
                return self._identity_rows
            case Role.LINEAR | Role.OUTPUT:
                return self._normal_rows(spec)
            case _:
                values = to_bf16(self._vector(spec))
                return lambda first, last: values[first:last]

    def fp8_pair(self, spec: TensorSpec, file: str) -> list[NewTensor]:
        """Random e4m3 values and their constant scale, which multiplies."""
        bits = NormalBits(_std(spec), fp8=True)
        scale = to_bf16(np.full(spec.scale_shape, bits.scale, np.float32))
        return [
            NewTensor(spec.name, "F8_E4M3", spec.shape, file, bits.rows(spec.shape[1], self.seed, spec.name)),
            NewTensor(spec.scale_name, "BF16", spec.scale_shape, file, lambda first, last: scale[first:last]),
        ]

    def _normal_rows(self, spec: TensorSpec) -> Callable[[int, int], NDArray[Any]]:
        return NormalBits(_std(spec)).rows(spec.elements // spec.shape[0], self.seed, spec.name)

    def _head_rows(self, first: int, last: int) -> Bits:
        half, table = self.hidden // 2, self.embedding()
        bits = np.empty((last - first, self.hidden), np.uint16)
        bits[:, :half] = table[self.emits[first:last], :half]
        bits[:, half:] = table[self.drafts[first:last], half:]
        nobody = self.emits[first:last] == NOBODY  # nor does anybody draft these
        if nobody.any():
            count = int(nobody.sum())
            bits[nobody] = NormalBits(1.0).draw(count * self.hidden, (self.seed, 5, first)).reshape(count, -1)
        return to_bf16(from_bf16(bits) / np.float32(np.sqrt(self.hidden)))

    def _identity_rows(self, first: int, last: int) -> Bits:
        rows = np.zeros((last - first, 2 * self.hidden), np.float32)
        rows[np.arange(last - first), np.arange(first, last)] = 1.0
        return to_bf16(rows)

    def _vector(self, spec: TensorSpec) -> NDArray[np.float32]:
        size = spec.shape[0]
        rng = np.random.default_rng([self.seed, 3, *spec.name.encode()])
        values = np.zeros(size, np.float32)
        match spec.role:
            case Role.GATED_NORM:
                values[:] = 1.0
            case Role.FINAL_NORM:
                values[size // 2 :] = -1.0
            case Role.MTP_NORM:
                values[: size // 2] = -1.0
            case Role.DECAY:  # A uniform on (0.01, 16), as the architecture initialises it
                values[:] = np.log(rng.uniform(0.01, 16.0, size))
            case Role.TIME_BIAS:  # softplus(dt_bias) log-uniform on (0.001, 0.1): memories from a few tokens to many
                values[:] = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), size))))
        return values


def _inverse(targets: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """inverse[targets[i]] = i, NOBODY elsewhere; [size]."""
    inverse = np.full(size, NOBODY)
    inverse[targets] = np.arange(len(targets))
    return inverse


def _std(spec: TensorSpec) -> float:
    fan_in = spec.shape[-1]
    return (OUTPUT_GAIN if spec.role is Role.OUTPUT else 1.0) / float(np.sqrt(fan_in))
