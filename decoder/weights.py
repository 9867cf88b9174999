"""Safetensors in, checked tensors out: every name and shape is verified before the first byte is read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .config import FP8_BLOCK, FULL_ATTENTION, ModelConfig
from .errors import CheckpointError

Shape = tuple[int, ...]

_SCALE_SUFFIX = "_scale_inv"
_SKIPPED_PREFIXES = ("model.visual.", "visual.")
_FLOAT_DTYPES = ("BF16", "F16", "F32")
_FP8_DTYPE = "F8_E4M3"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_FP8_LINEARS = frozenset(f"{name}_proj" for name in ("q", "k", "v", "o", "out", "gate", "up", "down")) | {
    "in_proj_qkv",
    "in_proj_z",
}


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A block-FP8 matrix: e4m3 values [N, K] and one scale a 128×128 block [⌈N/128⌉, ⌈K/128⌉], which multiplies."""

    values: torch.Tensor
    scale_inv: torch.Tensor

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] in `dtype`; the last blocks may be ragged."""
        rows, columns = self.values.shape
        scale = self.scale_inv.float().repeat_interleave(FP8_BLOCK, 0)[:rows]
        scale = scale.repeat_interleave(FP8_BLOCK, 1)[:, :columns]
        return self.values.float().mul_(scale).to(dtype)


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a checkpoint by its canonical (text-only) name, in file order, scales aside."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index, kind in enumerate(config.layer_types):
        shapes |= _layer_shapes(config, f"model.layers.{index}", kind)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    if config.has_mtp:
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
        shapes["mtp.pre_fc_norm_embedding.weight"] = (hidden,)
        shapes["mtp.pre_fc_norm_hidden.weight"] = (hidden,)
        shapes |= _layer_shapes(config, "mtp.layers.0", FULL_ATTENTION)
        shapes["mtp.norm.weight"] = (hidden,)
    return shapes


def is_fp8_linear(name: str) -> bool:
    """Whether a block-FP8 checkpoint stores this tensor as FP8 (MODEL section 1); everything else stays bf16."""
    return name.endswith(".weight") and name.split(".")[-2] in _FP8_LINEARS


def scale_shape(shape: Shape) -> Shape:
    """Shape of `weight_scale_inv` for an FP8 matrix."""
    return tuple(math.ceil(size / FP8_BLOCK) for size in shape)


def _layer_shapes(config: ModelConfig, prefix: str, kind: str) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    mixer = _attention_shapes(config) if kind == FULL_ATTENTION else _delta_net_shapes(config)
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        **mixer,
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return {f"{prefix}.{name}": shape for name, shape in layer.items()}


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, dim = config.hidden_size, config.head_dim
    q_width, kv_width = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        "self_attn.q_proj.weight": (2 * q_width, hidden),  # per head: query ‖ gate
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.o_proj.weight": (hidden, q_width),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _delta_net_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    return {
        "linear_attn.in_proj_qkv.weight": (config.conv_dim, hidden),
        "linear_attn.in_proj_z.weight": (config.value_dim, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (config.conv_dim, 1, config.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, config.value_dim),
    }


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: its file, its name there, and what the file's header says of it."""

    file: Path
    name: str
    dtype: str
    shape: Shape


class Checkpoint:
    """The tensors of one model directory, checked against a config before anything is loaded."""

    def __init__(self, model_dir: str | Path, config: ModelConfig) -> None:
        """Read the headers. Raises CheckpointError naming the missing, extra, misshapen or truncated tensor."""
        self.tensors = _stored_tensors(Path(model_dir))
        self.shapes = tensor_shapes(config)
        self._check()

    def stream(self, *, device: str = "cpu", skip_mtp: bool = False) -> Iterator[tuple[str, torch.Tensor | Fp8Weight]]:
        """Yield (canonical name, tensor or FP8 pair) in order, each read only when asked for."""
        handles: dict[Path, Any] = {}

        def read(name: str) -> torch.Tensor:
            stored = self.tensors[name]
            if stored.file not in handles:
                handles[stored.file] = safe_open(stored.file, framework="pt", device=device)
            tensor: torch.Tensor = handles[stored.file].get_tensor(stored.name)
            return tensor

        for name in self.shapes:
            if skip_mtp and name.startswith("mtp."):
                continue
            if self.tensors[name].dtype == _FP8_DTYPE:
                yield name, Fp8Weight(read(name), read(name + _SCALE_SUFFIX))
            else:
                yield name, read(name)

    def _check(self) -> None:
        expected = dict(self.shapes)
        for name, shape in self.shapes.items():
            stored = self.tensors.get(name)
            if stored is None:
                raise CheckpointError(
                    f"tensor {name} is missing, expected shape {list(shape)}",
                    "The checkpoint is incomplete or config.json describes another model.",
                )
            if stored.dtype == _FP8_DTYPE and len(shape) == 2:
                expected[name + _SCALE_SUFFIX] = scale_shape(shape)
        for name, stored in self.tensors.items():
            if name not in expected:
                raise CheckpointError(
                    f"tensor {stored.name} ({list(stored.shape)}) in {stored.file.name} is not part of this model",
                    _extra_hint(name),
                )
            if stored.shape != expected[name]:
                raise CheckpointError(
                    f"tensor {stored.name} in {stored.file.name} has shape {list(stored.shape)}, "
                    f"expected {list(expected[name])}"
                )
            if stored.dtype not in _FLOAT_DTYPES and not (stored.dtype == _FP8_DTYPE and is_fp8_linear(name)):
                raise CheckpointError(
                    f"tensor {stored.name} in {stored.file.name} is {stored.dtype}, expected one of "
                    f"{', '.join(_FLOAT_DTYPES)}" + (f" or {_FP8_DTYPE}" if is_fp8_linear(name) else "")
                )
        for name in expected:
            if name not in self.tensors:
                raise CheckpointError(f"tensor {name} is missing, expected shape {list(expected[name])}")


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, *, with_mtp: bool, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Every tensor in `dtype` (FP8 dequantised; A_log, dt_bias and norms too), by canonical name."""
    return {
        name: stored.dequantize(dtype) if isinstance(stored, Fp8Weight) else stored.to(dtype)
        for name, stored in checkpoint.stream(device=device, skip_mtp=not with_mtp)
    }


def _extra_hint(name: str) -> str:
    if name == "lm_head.weight":
        return "config.json ties the head to the embedding: remove the tensor or set tie_word_embeddings to false."
    if name.startswith("mtp."):
        return "Set mtp_num_hidden_layers to 1 in config.json to use the MTP head."
    if name.endswith(_SCALE_SUFFIX):
        return "A scale belongs to an FP8 matrix of the same name."
    return ""


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Canonical name → stored tensor over all shards; vision tensors left out."""
    index = directory / "model.safetensors.index.json"
    listed: dict[str, str] | None = None
    if index.exists():
        listed = _weight_map(index)
        files = [directory / name for name in sorted(set(listed.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{directory} holds no .safetensors file", "Only safetensors are loaded; pickled weights can run code."
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for stored in _read_header(file):
            if stored.name.startswith(_SKIPPED_PREFIXES):
                continue
            name = _canonical(stored.name)
            if name in tensors:
                raise CheckpointError(f"tensor {stored.name} is in both {tensors[name].file.name} and {file.name}")
            tensors[name] = stored
    for name, shard in (listed or {}).items():
        if not name.startswith(_SKIPPED_PREFIXES) and _canonical(name) not in tensors:
            raise CheckpointError(f"tensor {name} is missing: {index.name} places it in {shard}, which lacks it")
    return tensors


def _canonical(name: str) -> str:
    prefix = "model.language_model."
    return "model." + name.removeprefix(prefix) if name.startswith(prefix) else name


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error


def _read_header(file: Path) -> Iterator[StoredTensor]:
    """Tensors of one file from its header: u64 length, JSON, then the data whose end must lie inside the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if 8 + length > size or length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{file} is truncated or not a safetensors file ({size} bytes)")
            header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items()}
        stored = [StoredTensor(file, n, str(e["dtype"]), tuple(map(int, e["shape"]))) for n, e in header.items()]
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing, though the index lists it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error!r}") from error
    held = size - 8 - length
    for tensor in stored:
        if ends[tensor.name] > held:
            raise CheckpointError(
                f"tensor {tensor.name} in {file.name} is truncated: shape {list(tensor.shape)} ends at byte "
                f"{ends[tensor.name]}, the file holds {held}",
                "Copy or download the file again.",
            )
    yield from stored
