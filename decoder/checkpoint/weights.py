"""Checked tensors of a checkpoint: every name and shape is verified before the first one is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..errors import CheckpointError
from .config import FP8_BLOCK, FULL_ATTENTION, ModelConfig
from .safetensors_files import StoredTensor, stored_tensors

Shape = tuple[int, ...]

_SCALE_SUFFIX = "_scale_inv"
_FLOAT_DTYPES = ("BF16", "F16", "F32")
_FP8_DTYPE = "F8_E4M3"
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


class Checkpoint:
    """The tensors of one model directory, checked against a config before anything is loaded."""

    def __init__(self, model_dir: str | Path, config: ModelConfig) -> None:
        """Read the headers. Raises CheckpointError naming the missing, extra, misshapen or truncated tensor."""
        self.tensors: dict[str, StoredTensor] = stored_tensors(Path(model_dir))
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
            if name in self.tensors and self.tensors[name].dtype == _FP8_DTYPE and is_fp8_linear(name):
                expected[name + _SCALE_SUFFIX] = scale_shape(shape)
        for name, shape in expected.items():
            if name not in self.tensors:
                raise CheckpointError(
                    f"tensor {name} is missing, expected shape {list(shape)}",
                    "The checkpoint is incomplete, or config.json describes another model.",
                )
        for name, stored in self.tensors.items():
            _check_tensor(name, stored, expected.get(name))


def _check_tensor(name: str, stored: StoredTensor, shape: Shape | None) -> None:
    where = f"tensor {stored.name} in {stored.file.name}"
    if shape is None:
        raise CheckpointError(
            f"{where}, shape {list(stored.shape)}, is not part of the model of config.json", _extra_hint(name)
        )
    if stored.shape != shape:
        raise CheckpointError(f"{where} has shape {list(stored.shape)}, expected {list(shape)}")
    allowed = (*_FLOAT_DTYPES, _FP8_DTYPE) if is_fp8_linear(name) else _FLOAT_DTYPES
    if stored.dtype not in allowed:
        raise CheckpointError(f"{where} is {stored.dtype}, expected one of {', '.join(allowed)}")


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
