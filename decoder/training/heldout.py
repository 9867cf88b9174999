"""The held-out text of a model folder, from any Python installation: the modules that heldout.json names."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from json import loads
from pathlib import Path

from tokenizers import Tokenizer


@dataclass(frozen=True)
class HeldOutText:
    """Texts in the order of heldout.json; `unchanged` of them have the very bytes that training recorded."""

    texts: tuple[str, ...]
    unchanged: int
    listed: int

    @classmethod
    def read(cls, model: Path, library: Path | None = None) -> HeldOutText:
        """Reads what `library` (the running interpreter's by default) has of the listed files."""
        root = library or Path(sysconfig.get_paths()["stdlib"])
        files = loads((model / "heldout.json").read_text())["files"]
        texts: list[str] = []
        unchanged = 0
        for entry in files:
            path = root / entry["path"]
            if path.is_file():
                raw = path.read_bytes()
                unchanged += hashlib.sha256(raw).hexdigest() == entry["sha256"]
                texts.append(raw.decode())
        return cls(tuple(texts), unchanged, len(files))

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """All texts as one run of token ids."""
        return [i for text in self.texts for i in tokenizer.encode(text, add_special_tokens=False).ids]


def prompts(ids: list[int], count: int, length: int, seed: int = 0) -> Iterator[list[int]]:
    """`count` excerpts of exactly `length` tokens, from seeded places."""
    places = random.Random(seed)
    for _ in range(count):
        start = places.randrange(len(ids) - length)
        yield ids[start : start + length]
