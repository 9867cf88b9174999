"""Writes safetensors files block by block: the header first, then each block at its offset, from several threads."""

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError

BLOCK_BYTES = 8 << 20
ITEM_BYTES = {"BF16": 2, "F16": 2, "F8_E4M3": 1, "F32": 4}
Rows = Callable[[int, int], NDArray[Any]]


@dataclass(frozen=True)
class NewTensor:
    """One tensor to write. rows(first, last) returns the raw bits of those rows of the first axis, in order."""

    name: str
    dtype: str  # safetensors' name: BF16, F8_E4M3, F32
    shape: tuple[int, ...]
    file: str
    rows: Rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the first axis."""
        count = ITEM_BYTES[self.dtype]
        for size in self.shape[1:]:
            count *= size
        return count

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.row_bytes * self.shape[0]


def write_shards(
    directory: Path, tensors: Sequence[NewTensor], *, workers: int, on_bytes: Callable[[int, int], None] | None = None
) -> int:
    """Writes every file named by the tensors and, if there are several, their index; returns the bytes of all tensors.

    Memory: about workers × 2 blocks of 8 MiB, whatever the tensors' sizes. on_bytes(done, total) reports.
    """
    total, done = sum(tensor.n_bytes for tensor in tensors), 0

    def landed(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if on_bytes is not None:
            on_bytes(done, total)

    files: dict[str, list[NewTensor]] = {}
    for tensor in tensors:
        files.setdefault(tensor.file, []).append(tensor)
    for name, members in files.items():
        with (directory / f"{name}.safetensors").open("xb") as file:
            offsets = _write_header(file.fileno(), members)
            _write_blocks(file.fileno(), members, offsets, workers, landed)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {t.name: f"{t.file}.safetensors" for t in tensors}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return total


def safetensors_header(tensors: Sequence[NewTensor]) -> bytes:
    """Length-prefixed JSON header of one file, padded to 8 bytes, tensors laid out in the order given."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        span = [offset, offset + tensor.n_bytes]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span}
        offset += tensor.n_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_header(descriptor: int, tensors: Sequence[NewTensor]) -> list[int]:
    header = safetensors_header(tensors)
    _write_at(descriptor, header, 0)
    offsets, offset = [], len(header)
    for tensor in tensors:
        offsets.append(offset)
        offset += tensor.n_bytes
    os.ftruncate(descriptor, offset)
    return offsets


def _write_blocks(
    descriptor: int,
    tensors: Sequence[NewTensor],
    offsets: Sequence[int],
    workers: int,
    on_bytes: Callable[[int], None],
) -> None:
    def write(tensor: NewTensor, start: int, first: int, last: int) -> int:
        bits = np.ascontiguousarray(tensor.rows(first, last))
        expected = (last - first) * tensor.row_bytes
        if bits.nbytes != expected:
            raise CheckpointError(f"{tensor.name}: rows {first}–{last} gave {bits.nbytes} bytes, expected {expected}")
        _write_at(descriptor, bits.reshape(-1).view(np.uint8).data, start + first * tensor.row_bytes)
        return expected

    with ThreadPoolExecutor(workers) as pool:
        running: set[Future[int]] = set()
        for tensor, start in zip(tensors, offsets, strict=True):
            for first, last in _row_blocks(tensor):
                running.add(pool.submit(write, tensor, start, first, last))
                if len(running) >= 2 * workers:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    _report(done, on_bytes)
        _report(running, on_bytes)


def _report(done: Iterable[Future[int]], on_bytes: Callable[[int], None]) -> None:
    for future in done:
        on_bytes(future.result())


def _row_blocks(tensor: NewTensor) -> Iterator[tuple[int, int]]:
    step = max(1, BLOCK_BYTES // tensor.row_bytes)
    for first in range(0, tensor.shape[0], step):
        yield first, min(first + step, tensor.shape[0])


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
