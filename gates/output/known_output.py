"""The known output of a structured checkpoint as the reference: token for token, at any size and depth, in no time.

`model synth` builds its weights so that the greedy token after each token is fixed, by margins no rounding bridges,
and writes which it is beside them. It judges engines exactly where no reference model fits, and says nothing about
numerics: fully random and trained checkpoints do that, with the transformers reference.
"""

from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ...harness.config.checkpoints import RECIPE
from ...harness.errors import KernarcError
from .check import Scores

NEXT_TOKENS = "next_tokens.npy"  # int64 [V], as decoder/checkpoint/synthetic.py writes it


class KnownOutputError(KernarcError):
    """A checkpoint that does not say what it emits; the output check then cannot run, and nothing passes."""


class KnownOutputScorer:
    """Gap 0 for the token that must follow, infinite for every other."""

    def __init__(self, model_dir: Path) -> None:
        """Raises KnownOutputError where the checkpoint does not say what it emits."""
        self.name = f"known output of {model_dir.name}"
        path = model_dir / NEXT_TOKENS
        try:
            self._next: NDArray[np.int64] = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise KnownOutputError(
                f"{model_dir} has no known output: {path.name} {type(error).__name__}", _remedy(model_dir)
            ) from error

    def scores(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Scores:
        """Each token against what must follow the one before it, whether that was right or not."""
        before = np.array([prompt_ids[-1], *output_ids[:-1]], dtype=np.int64)
        is_token = (before >= 0) & (before < len(self._next))
        preferred = np.where(is_token, self._next[np.where(is_token, before, 0)], -1)
        gaps = np.where(preferred == np.asarray(output_ids, dtype=np.int64), 0.0, np.inf)
        return Scores(gaps, preferred)

    def release(self) -> None:
        """Nothing to free."""


def _remedy(model_dir: Path) -> str:
    if (model_dir / RECIPE).is_file():
        return f"it is damaged, or older than {NEXT_TOKENS}: delete the folder and make it again"
    return "only those of `kernarc-gate model synth` have one: check others with output_check.reference transformers"
