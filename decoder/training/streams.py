"""Token streams on the device, and the batches drawn from them."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import STANDARD_LIBRARY, Corpus, Document, read_shard
from .tokenizer import encode_stream

LIBRARY_SHARE = 0.35  # of sequences drawn from the standard library; the rest comes from packages
Ids = np.ndarray[tuple[int], np.dtype[np.uint16]]


@dataclass(frozen=True)
class Streams:
    """Training ids by pool (int32, on the device) and held-out ids."""

    library: Tensor
    packages: Tensor
    held_out: Tensor

    def batch(self, step: int, sequences: int, length: int, seed: int) -> Tensor:
        """[sequences, length + 1] ids of training step `step`: the same for the same seed on every machine."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        share = LIBRARY_SHARE if len(self.packages) > length + 1 else 1.0
        from_library = round(sequences * share)
        rows = []
        for pool, count in ((self.library, from_library), (self.packages, sequences - from_library)):
            if count:
                starts = torch.randint(0, len(pool) - length, (count, 1), generator=generator).to(pool.device)
                rows.append(pool[starts + torch.arange(length + 1, device=pool.device)])
        return torch.cat(rows).long()


def windows(stream: Tensor, length: int, stride: int) -> Tensor:
    """[n, length + 1] windows of a stream, `stride` apart."""
    return stream.unfold(0, length + 1, stride).long()


def _ordered(documents: list[Document]) -> list[Document]:
    """Files of one package and version next to each other, so that a long window spans related files."""
    return sorted(documents, key=lambda d: (d.origin, d.version, d.path))


def _encode_group(job: tuple[str, list[str]]) -> Ids:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return encode_stream(Tokenizer.from_str(job[0]), job[1])


def encode_documents(tokenizer: Tokenizer, documents: list[Document], workers: int) -> Ids:
    """One stream of all documents, in order; groups of files are encoded by `workers` processes."""
    ordered = _ordered(documents)
    size = max(1, min(400, len(ordered) // max(1, workers)))
    jobs = [(tokenizer.to_str(), [d.text for d in ordered[i : i + size]]) for i in range(0, len(ordered), size)]
    if workers <= 1 or not jobs:
        return np.concatenate([_encode_group(job) for job in jobs] or [np.zeros(0, dtype=np.uint16)])
    with get_context("fork").Pool(workers) as pool:
        return np.concatenate(pool.map(_encode_group, jobs, chunksize=1))


def read_corpus(folder: Path, workers: int) -> Corpus:
    """A corpus written by `python -m kernarc.decoder.training.prepare`."""
    with get_context("fork").Pool(workers) as pool:
        paths = sorted(folder.glob("*.jsonl.xz"))
        by_kind = defaultdict(list)
        for path, documents in zip(paths, pool.map(read_shard, paths, chunksize=1), strict=True):
            by_kind[path.name.split("-")[0]].extend(documents)
    return Corpus(by_kind["library"] + by_kind["packages"], _ordered(by_kind["heldout"]), 0, 0)


def encode_corpus(tokenizer: Tokenizer, corpus: Corpus, device: str, workers: int) -> Streams:
    """Encodes the three pools and moves them to the device."""
    library = [d for d in corpus.training if d.origin == STANDARD_LIBRARY]
    packages = [d for d in corpus.training if d.origin != STANDARD_LIBRARY]

    # All three before the device is touched: a process that holds a GPU context should not fork.
    encoded = [encode_documents(tokenizer, pool, workers) for pool in (library, packages, corpus.held_out)]
    return Streams(*(torch.from_numpy(ids.astype(np.int32)).to(device) for ids in encoded))
