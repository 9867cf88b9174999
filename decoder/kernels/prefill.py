"""The small kernels of prefill: weights unpacked into a dense tile, SwiGLU, the gated norm, the residual addition."""

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from .packing import CHUNK_ROW_BYTES, TILE, PackedLinear
from .packing import _pack_rows as pack_rows


@lru_cache(maxsize=4)
def element_order(element_bytes: int, device: torch.device) -> torch.Tensor:
    """int16 [128, 128 / bytes]: where element (row, column) of a chunk lies when packed, read off the packing."""
    index = torch.arange(TILE * CHUNK_ROW_BYTES).view(TILE, CHUNK_ROW_BYTES)
    low, high = (pack_rows(((index >> shift) & 0xFF).to(torch.uint8)).long() for shift in (0, 8))
    order = torch.empty(TILE * CHUNK_ROW_BYTES, dtype=torch.int64)
    order[low + 256 * high] = torch.arange(TILE * CHUNK_ROW_BYTES)
    elements = order.view(TILE, CHUNK_ROW_BYTES)[:, ::element_bytes] // element_bytes
    return elements.to(torch.int16).contiguous().to(device)


@triton.jit
def unpack_kernel(
    p_packed, p_order, p_scales, p_scale_rows, p_out, rows, K,
    CHUNKS: tl.constexpr, FP8: tl.constexpr, SCALE_COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr, T: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Programs (tile, chunk): 128 rows of WIDTH columns; FP8 by its bits, so that sm_80 runs the same code."""
    tile = tl.program_id(0)
    chunk = tl.program_id(1)
    in_tile = tl.arange(0, T)[:, None]
    in_chunk = tl.arange(0, WIDTH)[None, :]
    column = chunk * WIDTH + in_chunk
    row = tile * T + in_tile
    order = tl.load(p_order + in_tile * WIDTH + in_chunk)
    at = (tile * CHUNKS + chunk).to(tl.int64) * (T * WIDTH) + order
    inside = (row < rows) & (column < K)
    if FP8:
        byte = tl.load(p_packed + at, mask=inside, other=0).to(tl.int16)
        bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)  # fp16 bits of value · 2^-8
        scale_row = tl.load(p_scale_rows + row // 8)
        scale = tl.load(p_scales + scale_row * SCALE_COLUMNS + chunk)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scale
    else:
        value = tl.load(p_packed + at, mask=inside, other=0.0).to(tl.float32)
    target = row.to(tl.int64)
    if INTERLEAVED:  # gate and up rows alternate by eight
        target = ((row // 8) % 2).to(tl.int64) * (rows // 2) + (row // 16) * 8 + row % 8
    tl.store(p_out + target * K + column, value.to(p_out.dtype.element_ty), mask=inside)


def unpack_into(packed: PackedLinear, out: torch.Tensor) -> torch.Tensor:
    """The dense weights [N, K] of a packed layer, written over the start of `out`; gate rows come before up rows.

    Twin: packing.unpack.
    """
    dense = out.view(-1)[: packed.n * packed.k].view(packed.n, packed.k)
    weights = packed.weights if packed.is_fp8 else packed.weights.view(torch.bfloat16)
    order = element_order(1 if packed.is_fp8 else 2, weights.device)
    unpack_kernel[(packed.tiles, packed.chunks)](
        weights, order, order if packed.scales is None else packed.scales,
        order if packed.scale_rows is None else packed.scale_rows, dense, packed.n, packed.k, CHUNKS=packed.chunks,
        FP8=packed.is_fp8, SCALE_COLUMNS=packed.chunks, INTERLEAVED=packed.interleaved, T=TILE,
        WIDTH=order.shape[1], num_warps=8,
    )  # fmt: skip
    return dense


@triton.jit
def swiglu_kernel(p_gate_up, p_out, width, BLOCK: tl.constexpr):
    """Programs (row, column block): silu(gate)·up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(p_gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(p_gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_out + row * width + column, (gate / (1.0 + tl.exp(-gate)) * up).to(p_out.dtype.element_ty), mask=inside)


def swiglu_into(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate before up → out [T, I] = silu(gate)·up."""
    rows, width = out.shape
    swiglu_kernel[(rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def gated_norm_kernel(
    p_o, p_z, p_weight, p_out, eps, stride, H: tl.constexpr, V: tl.constexpr, HEAD_BLOCK: tl.constexpr
):
    """Program t: all heads of a row; normalise, times w, times silu(z)."""
    row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, HEAD_BLOCK)
    o_v = tl.arange(0, V)
    inside = (o_h < H)[:, None]
    o = tl.load(p_o + row * H * V + o_h[:, None] * V + o_v[None, :], mask=inside, other=0.0).to(tl.float32)
    z = tl.load(p_z + row * stride + o_h[:, None] * V + o_v[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(p_weight + o_v).to(tl.float32)
    y = o * tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)[:, None] * weight[None, :] * (z / (1.0 + tl.exp(-z)))
    tl.store(p_out + row * H * V + o_h[:, None] * V + o_v[None, :], y.to(p_out.dtype.element_ty), mask=inside)


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """o fp16 [T, H, V], z [T, H·V] (rows may be strided) → [T, H·V] in z's dtype. Twin: gdn_verify.gated_norm_naive."""
    rows, heads, value_dim = o.shape
    out = torch.empty(rows, heads * value_dim, dtype=z.dtype, device=z.device)
    gated_norm_kernel[(rows,)](
        o, z, weight, out, eps, z.stride(0), H=heads, V=value_dim, HEAD_BLOCK=triton.next_power_of_2(heads), num_warps=8
    )
    return out


def example_launches(empty: Callable[..., torch.Tensor]) -> None:
    """The kernels at the 27B shapes, for the compile check."""
    bf16 = torch.bfloat16
    fp8 = PackedLinear(
        empty(34816 * 5120, dtype=torch.uint8), empty(272, 40, dtype=torch.float32),
        empty(272, 8, 2, dtype=torch.int32), 34816, 5120, 1, True,
    )  # fmt: skip
    head = PackedLinear(empty(512 * 5120 * 2, dtype=torch.uint8), None, None, 512, 5120)
    for packed in (fp8, head):
        unpack_into(packed, empty(packed.n, packed.k, dtype=bf16))
    swiglu_into(empty(64, 34816, dtype=bf16), empty(64, 17408, dtype=bf16))
    gated_norm(empty(64, 48, 128), empty(64, 6144, dtype=bf16), empty(128, dtype=bf16), 1e-6)
