"""The structures of model.h for ctypes, and matrices packed the way gemm.h reads them."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

LANES = 16
GROUP = 64  # outputs a row of the packed layout holds

_float_p = ctypes.c_void_p


class MatrixView(ctypes.Structure):
    """`Matrix`."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class LayerView(ctypes.Structure):
    """`Layer`."""

    _fields_: ClassVar = [
        ("mixer_norm", _float_p),
        ("mlp_norm", _float_p),
        ("in_proj", MatrixView),
        ("kv_proj", MatrixView),
        ("out_proj", MatrixView),
        ("gate_up", MatrixView),
        ("down", MatrixView),
        ("q_norm", _float_p),
        ("k_norm", _float_p),
        ("taps", _float_p),
        ("negative_rate", _float_p),
        ("dt_bias", _float_p),
        ("out_norm", _float_p),
        ("half_keys", ctypes.c_void_p),
        ("half_values", ctypes.c_void_p),
        ("first", _float_p),
        ("second", _float_p),
        ("capacity", ctypes.c_int64),
        ("is_attention", ctypes.c_int64),
        ("origin", ctypes.c_int64),
    ]


class ModelView(ctypes.Structure):
    """`Model`."""

    _fields_: ClassVar = [
        *(
            (name, ctypes.c_int32)
            for name in (
                *("hidden", "inner", "vocab", "num_layers"),
                *("heads", "kv_heads", "head_dim", "rotary_half"),
                *("key_heads", "value_heads", "key_dim", "value_dim"),
                *("conv_width", "has_mtp", "embedding_is_bf16", "prefill_threads"),
            )
        ),
        ("eps", ctypes.c_float),
        ("unused", ctypes.c_float),
        ("table_floats", ctypes.c_int64),
        ("layers", ctypes.POINTER(LayerView)),
        ("mtp_layer", ctypes.POINTER(LayerView)),
        ("embedding", ctypes.c_void_p),
        ("head", MatrixView),
        ("draft_head", MatrixView),
        ("draft_ids", ctypes.c_void_p),
        ("final_norm", _float_p),
        ("embedding_norm", _float_p),
        ("hidden_norm", _float_p),
        ("mtp_norm", _float_p),
        ("fc_embedding", MatrixView),
        ("fc_hidden", MatrixView),
        ("cosine", _float_p),
        ("sine", _float_p),
    ]


def round_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def as_bf16(weight: torch.Tensor) -> torch.Tensor | None:
    """The same values in bf16, or None where they are not all representable."""
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.float(), weight) else None


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """[N, K] fp32 → (one flat tensor by groups of 64 outputs, whether in bf16): see `Matrix` in gemm.h."""
    outputs, inputs = weight.shape
    narrow = as_bf16(weight) if inputs % 2 == 0 else None
    values = weight if narrow is None else narrow
    padded = values.new_zeros(round_up(outputs, LANES), inputs)
    padded[:outputs] = values
    together = 1 if narrow is None else 2  # values of k in one 32-bit lane
    parts = []
    for group in torch.split(padded, GROUP):
        parts.append(group.view(group.shape[0], inputs // together, together).transpose(0, 1).reshape(-1))
    return torch.cat(parts), narrow is not None


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[I, K] twice → [2·I', K]: 32 outputs of gate, 32 of up, and so on, I' = I rounded up to 32 with zeros."""
    half = GROUP // 2
    rows = round_up(gate.shape[0], half)
    padded = gate.new_zeros(2, rows, gate.shape[1])
    padded[0, : gate.shape[0]], padded[1, : up.shape[0]] = gate, up
    return padded.view(2, rows // half, half, -1).transpose(0, 1).reshape(2 * rows, -1)


def pad_last(values: torch.Tensor) -> torch.Tensor:
    """[..., n] → contiguous fp32 [..., n rounded up to 16], zeros at the end."""
    padded = values.new_zeros(*values.shape[:-1], round_up(values.shape[-1], LANES))
    padded[..., : values.shape[-1]] = values
    return padded
