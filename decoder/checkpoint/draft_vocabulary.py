"""The tokens that may be drafted: a part of the vocabulary, so that each draft reads a part of the head.

The verify head stays whole, so the output does not change; a token outside the set is only never drafted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from ..errors import CheckpointError, DecoderError

FILE_NAME = "draft_vocab.json"  # beside a checkpoint that knows its own
_HINT = 'expected {"ids": [distinct token ids], "source": "where they come from"}; `model draft-vocab` writes one'


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Token ids, the most wanted first, and where the choice comes from."""

    ids: tuple[int, ...]
    source: str

    @classmethod
    def read(cls, path: Path, vocab_size: int) -> Self:
        """From its JSON file. Raises CheckpointError for another form, a repeated id or one outside the vocabulary."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"draft vocabulary {path} cannot be read: {error.strerror}", _HINT) from None
        except ValueError as error:
            raise CheckpointError(f"draft vocabulary {path} is not JSON: {error}", _HINT) from None
        ids = content.get("ids") if isinstance(content, dict) else None
        if not isinstance(ids, list) or not ids:
            raise CheckpointError(f"draft vocabulary {path} lists no ids", _HINT)
        for place, token_id in enumerate(ids):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise CheckpointError(
                    f"draft vocabulary {path}: id {place} is {token_id!r}, expected 0 … {vocab_size - 1}", _HINT
                )
        if len(set(ids)) < len(ids):
            repeated, count = Counter(ids).most_common(1)[0]
            raise CheckpointError(f"draft vocabulary {path}: id {repeated} is listed {count} times", _HINT)
        return cls(tuple(ids), str(content.get("source", "")))

    def write(self, path: Path) -> None:
        """As JSON, which `read` takes."""
        path.write_text(json.dumps({"source": self.source, "ids": list(self.ids)}) + "\n", encoding="utf-8")

    def rows(self, multiple: int, vocab_size: int) -> torch.Tensor:
        """int64 [R], ascending (so that equal logits go to the lowest id): the ids, filled up with the lowest others
        to the next multiple, which the packed head of a card needs."""
        size = min(-(-len(self.ids) // multiple) * multiple, vocab_size)
        return torch.tensor(sorted(filled(self.ids, size, vocab_size)))


def filled(ids: Iterable[int], size: int, vocab_size: int) -> list[int]:
    """The first `size` of `ids`, then the lowest other ids of the vocabulary until there are `size`."""
    chosen = list(dict.fromkeys(ids))[:size]
    held = set(chosen)
    others = (token_id for token_id in range(vocab_size) if token_id not in held)
    return chosen + [token_id for token_id, _ in zip(others, range(size - len(chosen)), strict=False)]


@dataclass(frozen=True, slots=True)
class Counted:
    """A vocabulary counted on outputs. seen: distinct ids there; coverage: the share of output tokens it holds."""

    vocabulary: DraftVocabulary
    outputs: int
    seen: int
    coverage: float


def count_outputs(outputs: Iterable[Iterable[int]], *, size: int, vocab_size: int, source: str) -> Counted:
    """The `size` most frequent ids of all outputs, ties to the lower id; filled up with the lowest ids where fewer
    were seen. Raises DecoderError where the outputs hold no token, or one outside the vocabulary."""
    counts = Counter(token_id for output in outputs for token_id in output)
    if not 1 <= size <= vocab_size:
        raise DecoderError(f"a draft vocabulary of {size} ids", f"choose 1 … {vocab_size}, the model's vocabulary")
    if not counts:
        raise DecoderError("these runs hold no output of this model", "name run directories of `bench` or `compare`")
    if min(counts) < 0 or max(counts) >= vocab_size:
        raise DecoderError(
            f"an output holds token {max(counts)}, the model's vocabulary has {vocab_size}",
            "name runs of this very model",
        )
    ranked = sorted(counts, key=lambda token_id: (-counts[token_id], token_id))
    vocabulary = DraftVocabulary(tuple(filled(ranked, size, vocab_size)), source)
    held = sum(counts[token_id] for token_id in vocabulary.ids)
    return Counted(vocabulary, counts.total(), len(counts), held / counts.total())
