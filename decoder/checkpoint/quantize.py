"""A checkpoint's large linears as block FP8: e4m3 values and one bf16 scale a 128 × 128 block, which multiplies."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import safe_open

from ..errors import CheckpointError
from .config import FP8_BLOCK, ModelConfig
from .layout import TensorSpec, checkpoint_tensors
from .new_directory import new_directory
from .safetensors_files import StoredTensor
from .shapes import fp8_config, text_only_config
from .shard_writer import ITEM_BYTES, NewTensor, write_shards
from .weights import Checkpoint

E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # the smallest normal bf16
COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "README.md",
)


def block_scales(weight: torch.Tensor) -> torch.Tensor:
    """fp32 [N, K] → bf16 [⌈N/128⌉, ⌈K/128⌉]: max|w| / 448 of each block, rounded up to bf16 so that nothing saturates.

    The last blocks may be ragged. A block of zeros has scale 1.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.view(-(-rows // FP8_BLOCK), FP8_BLOCK, -1, FP8_BLOCK)  # [⌈N/128⌉, 128, ⌈K/128⌉, 128]
    largest = blocks.new_tensor(E4M3_MAX)  # a tensor: by a Python number a GPU multiplies with the rounded reciprocal
    exact = (blocks.amax((1, 3)) / largest).clamp(min=SMALLEST_SCALE)
    nearest = exact.bfloat16()
    next_up = (nearest.view(torch.int16) + 1).view(torch.bfloat16)
    scales = torch.where(nearest.float() < exact, next_up, nearest)
    return torch.where(blocks.amax((1, 3)) == 0, torch.ones_like(scales), scales)


def quantize_rows(weight: torch.Tensor, scales: torch.Tensor, first_row: int) -> torch.Tensor:
    """fp32 [R, K], the rows from first_row on → e4m3 values, nearest, ties to even."""
    row_block = torch.arange(first_row, first_row + weight.shape[0], device=weight.device) // FP8_BLOCK
    per_weight = scales.float()[row_block].repeat_interleave(FP8_BLOCK, 1)[:, : weight.shape[1]]
    return (weight / per_weight).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_checkpoint(source: Path, out: Path, *, on_bytes: Callable[[int, int], None] | None = None) -> int:
    """Writes the text model of `source` as block FP8 to the new directory `out`; returns its bytes.

    Names become those of a text-only checkpoint; everything the published FP8 checkpoints keep in bf16 is copied as it
    is. Raises CheckpointError naming the tensor that cannot be quantised; then nothing is left behind.
    """
    config = ModelConfig.from_directory(source)
    stored = Checkpoint(source, config).tensors
    tensors: list[NewTensor] = []
    for spec in checkpoint_tensors(config):
        tensors += _new_tensors(spec, stored[spec.name])
    raw = fp8_config(text_only_config(source / "config.json"), config)
    with new_directory(out) as partial:
        total = write_shards(partial, tensors, workers=os.cpu_count() or 1, on_bytes=on_bytes)
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        for name in COPIED_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, partial / name)
    return total


def _new_tensors(spec: TensorSpec, stored: StoredTensor) -> list[NewTensor]:
    file = stored.file.name.removesuffix(".safetensors")
    if not spec.is_fp8_linear:
        if stored.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{stored.name} in {stored.file.name} is {stored.dtype}, which cannot be copied")
        return [NewTensor(spec.name, stored.dtype, spec.shape, file, _TensorRows(stored).bits)]
    if stored.dtype not in ("BF16", "F16", "F32"):
        raise CheckpointError(
            f"{stored.name} in {stored.file.name} is {stored.dtype} already, expected BF16, F16 or F32",
            "quantise the original checkpoint",
        )
    linear = _QuantisedLinear(stored)
    return [
        NewTensor(spec.name, "F8_E4M3", spec.shape, file, linear.value_bits),
        NewTensor(spec.scale_name, "BF16", spec.scale_shape, file, linear.scale_bits),
    ]


class _TensorRows:
    """Rows of one stored tensor, read when asked for."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored

    def read(self, first: int, last: int) -> torch.Tensor:
        """Rows first … last − 1 of the first axis."""
        with safe_open(self.stored.file, framework="pt") as file:
            rows: torch.Tensor = file.get_slice(self.stored.name)[first:last]
        return rows

    def bits(self, first: int, last: int) -> NDArray[Any]:
        """Their raw bytes."""
        return _raw(self.read(first, last))


class _QuantisedLinear(_TensorRows):
    """The same, quantised; its scales are found in a first pass over 128-row strips."""

    def __init__(self, stored: StoredTensor) -> None:
        super().__init__(stored)
        self._lock = Lock()

    @cached_property
    def _scales(self) -> torch.Tensor:
        strips = []
        for first in range(0, self.stored.shape[0], FP8_BLOCK):
            strip = self.read(first, min(first + FP8_BLOCK, self.stored.shape[0])).float()
            if not strip.isfinite().all():
                raise CheckpointError(
                    f"{self.stored.name} in {self.stored.file.name} holds NaN or infinity in rows {first} … "
                    f"{first + strip.shape[0] - 1}",
                    "a block with such a value has no scale",
                )
            strips.append(block_scales(strip))
        return torch.cat(strips)

    def scales(self) -> torch.Tensor:
        """All of them, found once."""
        with self._lock:
            return self._scales

    def value_bits(self, first: int, last: int) -> NDArray[Any]:
        """e4m3 bytes of some rows."""
        return _raw(quantize_rows(self.read(first, last).float(), self.scales(), first))

    def scale_bits(self, first: int, last: int) -> NDArray[Any]:
        """bf16 bytes of some rows of scales."""
        return _raw(self.scales()[first:last])


def _raw(tensor: torch.Tensor) -> NDArray[Any]:
    bits: NDArray[Any] = tensor.contiguous().view(torch.uint8).numpy()
    return bits
