"""How large a checkpoint is, from the headers of its safetensors files alone."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes as stored, and the number of weights."""

    stored_bytes: int
    weights: int


def checkpoint_size(folder: Path) -> CheckpointSize:
    """Adds up every tensor of every safetensors file. ConfigError where there is none, or one is not readable."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{folder} holds no safetensors file", "name a checkpoint directory")
    stored = weights = 0
    for path in paths:
        for tensor in _tensors(path):
            start, end = tensor["data_offsets"]
            stored += end - start
            weights += math.prod(tensor["shape"])
    return CheckpointSize(stored, weights)


def _tensors(path: Path) -> list[dict[str, list[int]]]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        return [tensor for name, tensor in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, AttributeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}", "copy the checkpoint again") from error
