"""FP8 × FP8 products for prefill: activations quantised 128 columns at a time, weights as the checkpoint stores them.

y = Σ_b s_x[t, b] · s_w[n/128, b] · (x8[t, b] · w8[n, b]) over blocks b of 128 columns, summed in fp32. It changes the
arithmetic (activations keep 4 bits of mantissa), so prefill uses it on request only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..errors import DecoderError
from .packing import BLOCK, PackedLinear
from .prefill import unpack_into

E4M3_MAX = tl.constexpr(448.0)
ROW_MULTIPLE = 4  # cuBLAS wants rows, and scale columns, in fours


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """values e4m3 [T', K]; scale fp32 [T', K/128] with the rows next to each other in memory, which multiplies."""

    values: torch.Tensor
    scale: torch.Tensor


def quantise_rows_naive(x: torch.Tensor) -> Fp8Rows:
    """Twin: x [T, K] → the largest value of each 128 columns at 448."""
    blocks = x.float().view(len(x), -1, BLOCK)
    scale = (blocks.abs().amax(-1) / E4M3_MAX.value).clamp_min(1e-12)
    values = (blocks / scale[..., None]).clamp(-E4M3_MAX.value, E4M3_MAX.value).to(torch.float8_e4m3fn)
    return Fp8Rows(values.view_as(x), scale)


@triton.jit
def quantise_kernel(p_x, p_values, p_scale, rows, scale_stride, K: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr):
    """Program t: row t; rows beyond the end are zeros."""
    row = tl.program_id(0).to(tl.int64)
    o_block = tl.arange(0, BLOCKS)
    column = o_block[:, None] * B + tl.arange(0, B)[None, :]
    inside = column < K
    x = tl.load(p_x + row * K + column, mask=inside & (row < rows), other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1) / E4M3_MAX, 1e-12)
    value = tl.minimum(tl.maximum(x / scale[:, None], -E4M3_MAX), E4M3_MAX)
    tl.store(p_values + row * K + column, value.to(p_values.dtype.element_ty), mask=inside)
    tl.store(p_scale + o_block * scale_stride + row, scale, mask=o_block * B < K)


def quantise_rows(x: torch.Tensor) -> Fp8Rows:
    """x [T, K], K a multiple of 128 → T' ≥ T rows, a multiple of four."""
    rows, k = x.shape
    padded = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    values = torch.empty(padded, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(k // BLOCK, padded, dtype=torch.float32, device=x.device)
    quantise_kernel[(padded,)](
        x, values, scale, rows, padded, K=k, BLOCKS=triton.next_power_of_2(k // BLOCK), B=BLOCK, num_warps=8
    )  # fmt: skip
    return Fp8Rows(values, scale.t())


def fits(packed: PackedLinear) -> bool:
    """Whether these weights can be multiplied in FP8: stored so, every 128×128 block under one scale of its own."""
    return (
        packed.scales is not None
        and packed.n % BLOCK == 0
        and packed.k % (ROW_MULTIPLE * BLOCK) == 0
        and packed.scales.shape == (packed.n // BLOCK, packed.k // BLOCK)
    )


def fp8_product(x: Fp8Rows, weights: torch.Tensor, scales: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T', K], weights e4m3 [N, K], scales fp32 [N/128, K/128] → [T', N]."""
    if x.values.is_cuda:
        return torch._scaled_mm(x.values, weights.t(), x.scale, scales.t(), out_dtype=out_dtype)
    dense = weights.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (x.values.float() * x.scale.repeat_interleave(BLOCK, 1) @ dense.t()).to(out_dtype)


def fp8_linear(x: torch.Tensor, packed: PackedLinear, room: torch.Tensor) -> torch.Tensor:
    """x [T, K] → [T, N] in x's dtype; `room` uint8 holds the unpacked weights meanwhile. `packed` must fit."""
    assert packed.scales is not None
    weights = unpack_into(packed, room).view(torch.float8_e4m3fn)
    return fp8_product(quantise_rows(x), weights, packed.scales, x.dtype)[: len(x)]


def check_fp8_products(device: torch.device) -> None:
    """Raise DecoderError where this card or this torch has no block-scaled FP8 product."""
    try:
        x = quantise_rows(torch.ones(4, 512, dtype=torch.bfloat16, device=device))
        weights = torch.ones(128, 512, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
        product = fp8_product(x, weights, torch.ones(1, 4, device=device), torch.bfloat16)
        right = bool((product == 512).all())
    except RuntimeError as error:
        raise DecoderError(
            f"no block-scaled FP8 product here: {str(error).splitlines()[0]}",
            "It needs sm_90 and CUDA 12.9 or later; leave out --prefill-dtype fp8.",
        ) from error
    if not right:
        raise DecoderError("the block-scaled FP8 product of ones is wrong here", "leave out --prefill-dtype fp8")


def example_launches(empty: Callable[..., torch.Tensor]) -> None:
    """The kernel at the 27B shapes, for the compile check."""
    quantise_rows(empty(64, 17408, dtype=torch.bfloat16))
