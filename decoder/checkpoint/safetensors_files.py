"""Which tensors the safetensors files of a model directory hold, from their headers alone."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"

_SKIPPED_PREFIXES = ("model.visual.", "visual.")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: its file, its name there, and what the file's header says of it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte offsets into the file's data
    end: int


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Canonical (text-only) name → tensor over all shards; vision tensors are left out.

    Raises CheckpointError for a directory without safetensors, an index that does not fit its shards, a tensor stored
    twice, and a header that does not fit its file.
    """
    index = directory / INDEX_NAME
    placed = _weight_map(index) if index.exists() else {}
    names = sorted(set(placed.values())) or sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise CheckpointError(
            f"{directory} holds no .safetensors file", "Only safetensors are loaded; pickled weights can run code."
        )
    tensors: dict[str, StoredTensor] = {}
    for file in (directory / name for name in names):
        for stored in _read_header(file):
            if stored.name.startswith(_SKIPPED_PREFIXES):
                continue
            other = tensors.setdefault(_canonical(stored.name), stored)
            if other is not stored:
                raise CheckpointError(f"tensor {stored.name} in {file.name} is stored twice, also in {other.file.name}")
    for name, shard in placed.items():
        if not name.startswith(_SKIPPED_PREFIXES) and _canonical(name) not in tensors:
            raise CheckpointError(f"tensor {name} is missing: {INDEX_NAME} places it in {shard}, which lacks it")
    return tensors


def _canonical(name: str) -> str:
    prefix = "model.language_model."
    return "model." + name.removeprefix(prefix) if name.startswith(prefix) else name


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = {str(n): str(f) for n, f in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    for file in weight_map.values():
        if Path(file).name != file:
            raise CheckpointError(f"{index} names the file {file!r}, expected one in the same directory")
    return weight_map


def _read_header(file: Path) -> Iterator[StoredTensor]:
    """Tensors of one file: u64 length, JSON header, then the data, inside which every tensor must lie."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if 8 + length > size or length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{file} is truncated or not a safetensors file ({size} bytes)")
            header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = [_from_entry(file, name, entry) for name, entry in header.items()]
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing, though the index lists it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error!r}") from error
    for tensor in tensors:
        _check_bytes(tensor, held=size - 8 - length)
    yield from tensors


def _from_entry(file: Path, name: str, entry: dict[str, Any]) -> StoredTensor:
    start, end = map(int, entry["data_offsets"])
    return StoredTensor(file, name, str(entry["dtype"]), tuple(map(int, entry["shape"])), start, end)


def _check_bytes(tensor: StoredTensor, held: int) -> None:
    if tensor.end > held:
        raise CheckpointError(
            f"tensor {tensor.name} in {tensor.file.name} is truncated: shape {list(tensor.shape)} ends at byte "
            f"{tensor.end}, the file holds {held}",
            "Copy or download the file again.",
        )
    needed = math.prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 0)
    if needed and tensor.end - tensor.start != needed:
        raise CheckpointError(
            f"tensor {tensor.name} in {tensor.file.name}: shape {list(tensor.shape)} of {tensor.dtype} takes {needed} "
            f"bytes, the header gives {tensor.end - tensor.start}"
        )
