"""Activations in FP8, one scale for 128 columns of a row: what FP8 products multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .packing import BLOCK

E4M3_MAX = tl.constexpr(448.0)
ROW_MULTIPLE = 4  # cuBLAS wants rows, and scale columns, in fours


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """values e4m3 [T', K]; scale fp32 [T', K/128] with the rows next to each other in memory, which multiplies.

    `rows` of the T' are real; what the others hold is left open.
    """

    values: torch.Tensor
    scale: torch.Tensor
    rows: int

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> Fp8Rows:
        """Room for `rows` rows, padded to a multiple of four. width: a multiple of 128."""
        padded = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
        values = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=device)
        return cls(values, torch.empty(width // BLOCK, padded, dtype=torch.float32, device=device).t(), rows)


@triton.jit
def store_fp8(y, p_values, p_scale, row, first_block, blocks, scale_stride, B: tl.constexpr, N: tl.constexpr):
    """Blocks first_block … of row `row`, fp32 y [N, 128]: values and scales of those below `blocks`.

    One division a block, not one a value; the conversion saturates, so what rounds beyond 448 needs no clamp.
    """
    o_block = tl.arange(0, N)
    inside = first_block + o_block < blocks
    scale = tl.maximum(tl.max(tl.abs(y), axis=1) / E4M3_MAX, 1e-12)
    value = y * (1.0 / scale)[:, None]
    place = (row * blocks + first_block + o_block)[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(p_values + place, value.to(p_values.dtype.element_ty), mask=inside[:, None])
    tl.store(p_scale + (first_block + o_block) * scale_stride + row, scale, mask=inside)


@triton.jit
def quantise_kernel(p_x, p_values, p_scale, scale_stride, blocks, N: tl.constexpr, B: tl.constexpr):
    """Program t: row t."""
    row = tl.program_id(0).to(tl.int64)
    o_block = tl.arange(0, N)
    place = (row * blocks + o_block)[:, None] * B + tl.arange(0, B)[None, :]
    x = tl.load(p_x + place, mask=(o_block < blocks)[:, None], other=0.0).to(tl.float32)
    store_fp8(x, p_values, p_scale, row, 0, blocks, scale_stride, B, N)


def quantise_rows(x: torch.Tensor) -> Fp8Rows:
    """x [T, K], K a multiple of 128, the largest value of each 128 columns at 448. Twin: quantise_rows_naive."""
    rows, width = x.shape
    out = Fp8Rows.empty(rows, width, x.device)
    blocks = width // BLOCK
    quantise_kernel[(rows,)](
        x, out.values, out.scale, out.scale.stride(1), blocks, N=triton.next_power_of_2(blocks), B=BLOCK, num_warps=8
    )  # fmt: skip
    return out


def quantise_rows_naive(x: torch.Tensor) -> Fp8Rows:
    """Twin."""
    blocks = x.float().view(len(x), -1, BLOCK)
    scale = (blocks.abs().amax(-1) / E4M3_MAX.value).clamp_min(1e-12)
    values = (blocks / scale[..., None]).clamp(-E4M3_MAX.value, E4M3_MAX.value).to(torch.float8_e4m3fn)
    return Fp8Rows(values.view_as(x), scale, len(x))
