"""The small kernels of prefill: weights unpacked into a dense matrix, SwiGLU, norms, merged and gated attention."""

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from .packing import CHUNK_ROW_BYTES, TILE, PackedLinear
from .packing import _pack_rows as pack_rows

GROUP_BYTES = 8  # of a row, which the packing keeps together
GROUPS = CHUNK_ROW_BYTES // GROUP_BYTES


@lru_cache(maxsize=4)
def group_order(device: torch.device) -> torch.Tensor:
    """int16 [128, 16]: where the 8 bytes (row, group) of a chunk lie when packed, in groups; read off the packing."""
    index = torch.arange(TILE * CHUNK_ROW_BYTES).view(TILE, CHUNK_ROW_BYTES)
    low, high = (pack_rows(((index >> shift) & 0xFF).to(torch.uint8)).long() for shift in (0, 8))
    order = torch.empty(TILE * CHUNK_ROW_BYTES, dtype=torch.int64)
    order[low + 256 * high] = torch.arange(TILE * CHUNK_ROW_BYTES)
    places = order.view(TILE, GROUPS, GROUP_BYTES)
    assert torch.equal(places, places[..., :1] // GROUP_BYTES * GROUP_BYTES + torch.arange(GROUP_BYTES)), (
        "packing split"
    )
    return (places[..., 0] // GROUP_BYTES).to(torch.int16).contiguous().to(device)


@triton.jit
def unpack_kernel(
    p_packed, p_order, p_scales, p_scale_rows, p_out, rows, K,
    CHUNKS: tl.constexpr, FP8: tl.constexpr, RAW: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr, T: tl.constexpr, G: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Programs (tile, chunk): 128 rows of G groups of EACH elements; FP8 by its bits, so that sm_80 runs the same."""
    tile = tl.program_id(0)
    chunk = tl.program_id(1)
    in_tile = tl.arange(0, T)
    o_group = tl.arange(0, G)
    o_each = tl.arange(0, EACH)
    order = tl.load(p_order + in_tile[:, None] * G + o_group[None, :])
    group = tl.load(p_packed + (tile * CHUNKS + chunk).to(tl.int64) * (T * G) + order)
    part = (group[:, :, None] >> (o_each * (64 // EACH))[None, None, :]).to(tl.int16)
    row = tile * T + in_tile
    column = (chunk * G + o_group)[:, None] * EACH + o_each[None, :]
    target = row.to(tl.int64)
    if INTERLEAVED:  # gate and up rows alternate by eight
        target = ((row // 8) % 2).to(tl.int64) * (rows // 2) + (row // 16) * 8 + row % 8
    p_target = p_out + target[:, None, None] * K + column[None, :, :]
    inside = (row < rows)[:, None, None] & (column < K)[None, :, :]
    if RAW:
        tl.store(p_target, part.to(tl.uint8, bitcast=False), mask=inside)
    else:
        if FP8:
            bits = ((part & 0x80) << 8) | ((part & 0x7F) << 7)  # fp16 bits of value · 2^-8
            scale_row = tl.load(p_scale_rows + row // 8)
            scale = tl.load(p_scales + scale_row * SCALE_COLUMNS + chunk)
            value = bits.to(tl.float16, bitcast=True).to(tl.float32) * (256.0 * scale)[:, None, None]
        else:
            value = part.to(tl.bfloat16, bitcast=True).to(tl.float32)
        tl.store(p_target, value.to(p_out.dtype.element_ty), mask=inside)


def unpack_into(packed: PackedLinear, out: torch.Tensor) -> torch.Tensor:
    """The dense weights [N, K] of a packed layer, written over the start of `out`; gate rows come before up rows.

    Into uint8 go the e4m3 bytes of FP8 weights as they are, without their scales. Twin: packing.unpack.
    """
    dense = out.view(-1)[: packed.n * packed.k].view(packed.n, packed.k)
    order = group_order(packed.weights.device)
    unpack_kernel[(packed.tiles, packed.chunks)](
        packed.weights.view(torch.int64), order, order if packed.scales is None else packed.scales,
        order if packed.scale_rows is None else packed.scale_rows, dense, packed.n, packed.k, CHUNKS=packed.chunks,
        FP8=packed.is_fp8, RAW=out.dtype == torch.uint8, SCALE_COLUMNS=packed.chunks, INTERLEAVED=packed.interleaved,
        T=TILE, G=GROUPS, EACH=GROUP_BYTES if packed.is_fp8 else GROUP_BYTES // 2, num_warps=8,
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
def add_norm_kernel(p_stream, p_y, p_weight, p_out, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """Program t: stream += y, then its RMSNorm."""
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    inside = o_d < D
    x = tl.load(p_stream + row * D + o_d, mask=inside, other=0.0)
    x += tl.load(p_y + row * D + o_d, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_stream + row * D + o_d, x, mask=inside)
    weight = 1.0 + tl.load(p_weight + o_d, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps) * weight
    tl.store(p_out + row * D + o_d, y.to(p_out.dtype.element_ty), mask=inside)


def add_norm(stream: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """stream fp32 [T, D] += y [T, D] → its RMSNorm with weight [D], in y's dtype. Twin: norm.rms_norm_naive."""
    out = torch.empty_like(y)
    rows, width = y.shape
    add_norm_kernel[(rows,)](
        stream, y, weight, out, eps, D=width, BLOCK=triton.next_power_of_2(width), num_warps=8
    )  # fmt: skip
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


@triton.jit
def merge_kernel(
    p_one, p_one_log, p_other, p_other_log, p_gate, p_out, rows, row_stride, head_stride, other_row_stride,
    other_head_stride, gate_stride, H: tl.constexpr, HEAD_BLOCK: tl.constexpr, D: tl.constexpr, HAS_OTHER: tl.constexpr,
):  # fmt: skip
    """Program t: all heads of a row, the two parts weighed by their softmax sums, times sigmoid(gate)."""
    row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, HEAD_BLOCK)
    o_wide = o_h.to(tl.int64)[:, None]
    o_d = tl.arange(0, D)
    inside = (o_h < H)[:, None]
    o = tl.load(p_one + row * row_stride + o_wide * head_stride + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_OTHER:
        log = tl.load(p_one_log + o_h * rows + row, mask=o_h < H, other=0.0)
        other_log = tl.load(p_other_log + o_h * rows + row, mask=o_h < H, other=0.0)
        p_own = p_other + row * other_row_stride + o_wide * other_head_stride + o_d[None, :]
        other = tl.load(p_own, mask=inside, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(other_log - log))[:, None]
        o = o * share + other * (1.0 - share)
    gate = tl.load(p_gate + row * gate_stride + (2 * o_h[:, None] + 1) * D + o_d[None, :], mask=inside, other=0.0)
    y = o * (1.0 / (1.0 + tl.exp(-gate.to(tl.float32))))
    tl.store(p_out + row * H * D + o_h[:, None] * D + o_d[None, :], y.to(p_out.dtype.element_ty), mask=inside)


Part = tuple[torch.Tensor, torch.Tensor | None]  # attention output [H, T, D], log of the softmax's sum fp32 [H, T]


def merge_and_gate(one: Part, other: Part | None, qkv: torch.Tensor) -> torch.Tensor:
    """Attention over one or two disjoint sets of keys, times sigmoid(gate) → [T, H·D] in qkv's dtype.

    qkv [T, …]: per query head [q ‖ gate]. The last dimension of the outputs is contiguous; a single part needs no sum.
    """
    heads, rows, dim = one[0].shape
    second = one if other is None else other
    out = torch.empty(rows, heads * dim, dtype=qkv.dtype, device=qkv.device)
    merge_kernel[(rows,)](
        one[0], out if one[1] is None else one[1], second[0], out if second[1] is None else second[1], qkv, out, rows,
        one[0].stride(1), one[0].stride(0), second[0].stride(1), second[0].stride(0), qkv.stride(0), H=heads,
        HEAD_BLOCK=triton.next_power_of_2(heads), D=dim, HAS_OTHER=other is not None, num_warps=8,
    )  # fmt: skip
    return out


def merge_and_gate_naive(one: Part, other: Part | None, gate: torch.Tensor) -> torch.Tensor:
    """Twin: gate [T, H, D] → fp32 [T, H·D]."""
    o = one[0].float()
    if other is not None and one[1] is not None and other[1] is not None:
        total = torch.logaddexp(one[1], other[1])
        o = o * (one[1] - total).exp()[..., None] + other[0].float() * (other[1] - total).exp()[..., None]
    return (o.transpose(0, 1) * gate.float().sigmoid()).flatten(1)


def example_launches(empty: Callable[..., torch.Tensor]) -> None:
    """The kernels at the 27B shapes, for the compile check."""
    bf16, fp32 = torch.bfloat16, torch.float32
    fp8 = PackedLinear(
        empty(34816 * 5120, dtype=torch.uint8), empty(272, 40, dtype=fp32), empty(272, 8, 2, dtype=torch.int32),
        34816, 5120, 1, True,
    )  # fmt: skip
    head = PackedLinear(empty(512 * 5120 * 2, dtype=torch.uint8), None, None, 512, 5120)
    for packed, dtype in ((fp8, bf16), (fp8, torch.uint8), (head, bf16)):
        unpack_into(packed, empty(packed.n, packed.k, dtype=dtype))
    swiglu_into(empty(64, 34816, dtype=bf16), empty(64, 17408, dtype=bf16))
    gated_norm(empty(64, 48, 128), empty(64, 6144, dtype=bf16), empty(128, dtype=bf16), 1e-6)
    add_norm(empty(64, 5120, dtype=fp32), empty(64, 5120, dtype=bf16), empty(5120, dtype=bf16), 1e-6)
    part = (empty(24, 64, 256), empty(24, 64, dtype=fp32))
    merge_and_gate(part, part, empty(64, 14336, dtype=bf16))
