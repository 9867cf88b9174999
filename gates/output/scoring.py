"""The reference behind a cache on disk, and the rounding errors that it shows itself: bf16 against fp32 on one text."""

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import OutputCheckConfig
from .check import Scores, Text
from .near_ties import RoundingErrors
from .reference import Reference, ReferenceModelError, model_sha256

CONTENDERS = 8  # tokens whose order rounding may change
FORMAT = "2"  # of a cached result; changed whenever its meaning changes

Arrays = dict[str, NDArray[Any]]


class ReferenceScorer:
    """Scores outputs with one checkpoint; a result is kept by hash of model, precision, prompt and output."""

    def __init__(self, model_dir: Path, config: OutputCheckConfig, cache_dir: Path) -> None:
        self.name = f"transformers, {config.dtype}, {model_dir.name}"
        self._model_dir = model_dir
        self._config = config
        self._cache_dir = cache_dir
        self._model_sha256 = model_sha256(model_dir)
        self._loaded: tuple[str, Reference] | None = None

    def scores(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Scores:
        """From the cache where the same model read the same text before."""
        text = (prompt_ids, output_ids)
        found = self._cached("scores", text, partial(self._scored, text))
        return Scores(found["gaps"], found["preferred"], found["leads"])

    def rounding_errors(self, texts: Sequence[Text]) -> RoundingErrors:
        """What bf16 does, in the reference, to the lead of its first choice; τ and the rate of near-ties follow.

        An engine in bf16 emits another token than fp32 would only where the gap is below the difference of the errors
        of the two logits. Raises ReferenceModelError where the reference's logits are not finite.
        """
        if not texts:
            raise ValueError("rounding errors need at least one text")
        exact = [self._cached("contenders", text, partial(self._contenders, text)) for text in texts]
        rounded = [
            self._cached("rounded", text, partial(self._rounded, text, found["ids"]))
            for text, found in zip(texts, exact, strict=True)
        ]
        logits = [np.concatenate([found["logits"] for found in both]).astype(np.float64) for both in (exact, rounded)]
        try:
            return RoundingErrors.between(*logits)
        except ValueError as error:
            raise ReferenceModelError(
                "the reference's own logits are not finite", "the checkpoint's weights are broken"
            ) from error

    def _scored(self, text: Text) -> Arrays:
        prompt, output = text
        reference = self._reference(self._config.dtype)
        safe = [token if 0 <= token < reference.vocab_size else 0 for token in output]
        gaps, leads = np.empty(len(output)), np.empty(len(output))
        preferred, row = np.empty(len(output), dtype=np.int64), 0
        for logits in reference.logit_rows(prompt, safe):
            rows = slice(row, row + len(logits))
            top = logits.max(dim=-1)
            emitted = torch.tensor(safe[rows], device=logits.device)
            gaps[rows] = (top.values - logits.gather(1, emitted[:, None])[:, 0]).cpu().numpy()
            preferred[rows] = top.indices.cpu().numpy()
            first_two = logits.topk(2, dim=-1).values
            leads[rows] = (first_two[:, 0] - first_two[:, 1]).cpu().numpy()
            row += len(logits)
        gaps[[index for index, token in enumerate(output) if safe[index] != token]] = np.inf  # not a token at all
        return {"gaps": gaps, "preferred": preferred, "leads": leads}

    def _contenders(self, text: Text) -> Arrays:
        """The ids and fp32 logits of the tokens that lead at each position."""
        tops = [logits.topk(CONTENDERS, dim=-1) for logits in self._reference("float32").logit_rows(*text)]
        ids = np.concatenate([top.indices.cpu().numpy() for top in tops])
        return {"ids": ids, "logits": np.concatenate([top.values.cpu().numpy() for top in tops])}

    def _rounded(self, text: Text, ids: NDArray[np.int64]) -> Arrays:
        """The same tokens' logits in bf16."""
        found, row = [], 0
        for logits in self._reference("bfloat16").logit_rows(*text):
            wanted = torch.from_numpy(ids[row : row + len(logits)]).to(logits.device)
            found.append(logits.gather(1, wanted).cpu().numpy())
            row += len(logits)
        return {"logits": np.concatenate(found)}

    def release(self) -> None:
        """Frees the model: the engines that are measured next want the memory."""
        self._loaded = None

    def _reference(self, dtype: str) -> Reference:
        """One model in memory at a time: two of a large one would not fit."""
        if self._loaded is None or self._loaded[0] != dtype:
            self._loaded = None
            loaded = Reference.load(self._model_dir, dtype, self._config.device, self._config.chunk_tokens)
            self._loaded = (dtype, loaded)
        return self._loaded[1]

    def _cached(self, kind: str, text: Text, compute: Callable[[], Arrays]) -> Arrays:
        dtype = self._config.dtype if kind == "scores" else ""
        key = hashlib.sha256("\n".join([FORMAT, kind, dtype, self._model_sha256]).encode())
        for ids in text:
            key.update(hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).digest())
        path = self._cache_dir / f"{key.hexdigest()}.npz"
        stored = _read(path)
        if stored is None:
            try:
                stored = compute()
            except (RuntimeError, MemoryError) as error:  # torch's errors, out of memory above all
                raise ReferenceModelError(
                    f"the reference could not read {len(text[0]):,} + {len(text[1]):,} tokens: {error}",
                    "lower output_check.chunk_tokens, or set its dtype to bfloat16",
                ) from error
            _write(path, stored)
        return stored


def _read(path: Path) -> Arrays | None:
    """None where it is not there or cannot be read: it is computed again."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, EOFError, BadZipFile):
        return None


def _write(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_suffix(f".{os.getpid()}.npz")
    np.savez(partial_path, **arrays)  # type: ignore[arg-type]
    partial_path.replace(path)
