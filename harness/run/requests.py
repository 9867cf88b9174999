"""The prompts of a run: exact lengths, the same for every build, no two with a common first block of 16 tokens."""

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .storage import Request

BLOCK_TOKENS = 16  # the smallest prefix-cache block of the public engines
# Not the library's own, or tables of characters and words that lead every model into a loop.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "lib2to3"}
CORPUS_TOKENS = 500_000


class PromptSource(Protocol):
    """Where prompt ids come from. description and sha256 go into the manifest."""

    description: str
    sha256: str

    def ids(self, key: str, length: int) -> NDArray[np.int64]:
        """The first `length` ids of the endless sequence that belongs to this key."""
        ...


class RandomIds:
    """Uniform ids below vocab_size, without the excluded ones (end of text); the same on every machine."""

    def __init__(self, vocab_size: int, excluded: Sequence[int] = ()) -> None:
        self._allowed = np.setdiff1d(np.arange(vocab_size, dtype=np.int64), np.array(excluded, dtype=np.int64))
        if len(self._allowed) < 2:
            raise ConfigError(f"vocab_size {vocab_size} leaves no two ids to make prompts of")
        self.description = f"random ids below {vocab_size}"
        self.sha256 = hashlib.sha256(self._allowed.tobytes()).hexdigest()

    def ids(self, key: str, length: int) -> NDArray[np.int64]:
        """SHAKE-256 of the key, 8 bytes an id."""
        words = np.frombuffer(hashlib.shake_256(key.encode()).digest(8 * length), dtype="<u8")
        return self._allowed[(words % np.uint64(len(self._allowed))).astype(np.int64)]


class LibraryText:
    """The Python standard library's own sources through a tokenizer, read from a different place for every key.

    Where a heldout.json lies beside the tokenizer, only the files that it lists: text that the model never saw.
    """

    def __init__(self, tokenizer_json: Path, library: Path | None = None, corpus_tokens: int = CORPUS_TOKENS) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(tokenizer_json))
        folder = library or Path(sysconfig.get_paths()["stdlib"])
        digest = hashlib.sha256(tokenizer_json.read_bytes())
        ids: list[int] = []
        held_out = tokenizer_json.with_name("heldout.json")
        unseen = held_out.is_file()
        for path in _held_out_sources(held_out, folder) if unseen else _sources(folder):
            text = path.read_text(encoding="utf-8", errors="replace")
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + text.encode() + b"\0")
            ids.extend(tokenizer.encode(text, add_special_tokens=False).ids)
            if len(ids) >= corpus_tokens:
                break
        if len(ids) < 2 * BLOCK_TOKENS:
            listed = f" that {held_out} lists" if unseen else ""
            raise ConfigError(
                f"{folder} holds no Python sources{listed} to make prompts of",
                "run under a Python whose standard library comes as source files",
            )
        self._corpus = np.array(ids, dtype=np.int64)
        self.description = f"{'held-out ' if unseen else ''}Python standard library text"
        self.sha256 = digest.hexdigest()

    def ids(self, key: str, length: int) -> NDArray[np.int64]:
        """The corpus from an offset that belongs to the key, starting over at its end."""
        offset = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") % len(self._corpus)
        return np.take(self._corpus, np.arange(offset, offset + length), mode="wrap")


@dataclass(frozen=True)
class RequestShape:
    """How many prompts of which lengths."""

    depths: tuple[int, ...]
    requests_per_depth: int
    warmup_requests_per_depth: int
    launches: int
    max_tokens: int
    seed: int

    def names(self) -> Iterator[tuple[str, int, int, bool]]:
        """(request_id, depth, launch, is_warmup) of every request of the run, in a fixed order."""
        for launch in range(self.launches):
            for depth in self.depths:
                for number in range(self.warmup_requests_per_depth):
                    yield f"d{depth}-l{launch}-w{number}", depth, launch, True
                for number in range(self.requests_per_depth):
                    yield f"d{depth}-l{launch}-r{number}", depth, launch, False


class RequestSet:
    """All prompts of a run; made launch by launch, distinct over all launches."""

    def __init__(self, shape: RequestShape, source: PromptSource) -> None:
        self.shape = shape
        self.source = source
        self._keys = dict(self._distinct_keys())

    @property
    def prompt_source(self) -> str:
        """For the manifest: what the prompts are, and the hash of where they come from."""
        return f"{self.source.description}, sha256 {self.source.sha256}"

    @property
    def sha256(self) -> str:
        """Of every prompt's first block, the whole prompts of launch 0, the lengths and the output length."""
        digest = hashlib.sha256(json.dumps([self.prompt_source, self.shape.max_tokens]).encode())
        for request_id, depth, launch, _ in self.shape.names():
            length = depth if launch == 0 else BLOCK_TOKENS
            digest.update(f"{request_id} {depth} ".encode() + self._ids(request_id, length).astype("<i8").tobytes())
        return digest.hexdigest()

    def launch(self, launch: int) -> list[Request]:
        """The prompts of one launch, warm-ups included."""
        return [
            Request(
                request_id=request_id,
                depth=depth,
                launch=launch,
                prompt_ids=tuple(self._ids(request_id, depth).tolist()),
                is_warmup=is_warmup,
            )
            for request_id, depth, of_launch, is_warmup in self.shape.names()
            if of_launch == launch
        ]

    def _ids(self, request_id: str, length: int) -> NDArray[np.int64]:
        return self.source.ids(self._keys[request_id], length)

    def _distinct_keys(self) -> Iterator[tuple[str, str]]:
        seen: set[bytes] = set()
        for request_id, _, _, _ in self.shape.names():
            for attempt in range(1000):
                key = f"{self.shape.seed}:{request_id}:{attempt}"
                block = self.source.ids(key, BLOCK_TOKENS).tobytes()
                if block not in seen:
                    break
            else:
                raise ConfigError(
                    f"{self.source.description} have too few different first blocks for {len(seen) + 1} requests",
                    "raise vocab_size, or ask for fewer requests or launches",
                )
            seen.add(block)
            yield request_id, key


def prompt_sha256(prompt_ids: Sequence[int]) -> str:
    """Of the ids alone."""
    return hashlib.sha256(np.array(prompt_ids, dtype="<i8").tobytes()).hexdigest()


def request_sha256(prompt_ids: Sequence[int], max_tokens: int) -> str:
    """Of everything that decides the answer: the ids and the sampling parameters (greedy, fixed length)."""
    sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return hashlib.sha256((prompt_sha256(prompt_ids) + json.dumps(sampling, sort_keys=True)).encode()).hexdigest()


def _sources(folder: Path) -> list[Path]:
    paths = (path for path in folder.rglob("*.py") if not LEFT_OUT & set(path.relative_to(folder).parts))
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def _held_out_sources(held_out: Path, folder: Path) -> list[Path]:
    """The files that heldout.json lists, as far as this Python has them."""
    try:
        listed = [Path(entry["path"]) for entry in json.loads(held_out.read_text(encoding="utf-8"))["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{held_out} is no list of held-out files: {error!r}",
            'it should hold {"files": [{"path": ...}, ...]}, as training writes it',
        ) from error
    return [folder / path for path in listed if (folder / path).is_file()]
