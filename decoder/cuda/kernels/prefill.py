"""The small kernels of prefill: SwiGLU, norms, merged and gated attention, each in the format the next product reads.

Where that is FP8 (fp8_rows.py) the values are quantised before they leave the registers: a kernel of its own would read
and write three bytes a value more.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .fp8_rows import Fp8Rows, store_fp8
from .gdn_prepare import log_gates_naive, softplus
from .packing import BLOCK

SWIGLU_BLOCKS = 8  # of 128 columns, a program
NORM_WARPS = 8  # of a program of add_norm, a block of 128 columns each
NORMED_HEADS = 8  # a program
GATES_BLOCK = 1024
Out = torch.Tensor | Fp8Rows  # what a kernel fills


def _places(out: Out) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(values, scales, stride from one column block's scales to the next); the latter two are idle without FP8."""
    if isinstance(out, Fp8Rows):
        return out.values, out.scale, out.scale.stride(1)
    return out, out, 0


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) as a square: a reciprocal root is one instruction, a division eight."""
    root = tl.rsqrt(1.0 + tl.exp(-x))
    return root * root


@triton.jit
def swiglu_kernel(p_gate_up, p_out, p_scale, scale_stride, width, N: tl.constexpr, B: tl.constexpr, FP8: tl.constexpr):
    """Programs (row, N column blocks): silu(gate)·up."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * N
    column = (first + tl.arange(0, N))[:, None] * B + tl.arange(0, B)[None, :]
    inside = column < width
    gate = tl.load(p_gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(p_gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    y = gate * up * sigmoid(gate)
    if FP8:
        store_fp8(y, p_out, p_scale, row, first, width // B, scale_stride, B, N)
    else:
        tl.store(p_out + row * width + column, y.to(p_out.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor, out: Out) -> Out:
    """gate_up [T, 2I], gate before up → out [T, I] = silu(gate)·up. In FP8 I must be a multiple of 128."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    values, scales, stride = _places(out)
    swiglu_kernel[(rows, triton.cdiv(width, SWIGLU_BLOCKS * BLOCK))](
        gate_up, values, scales, stride, width, N=SWIGLU_BLOCKS, B=BLOCK, FP8=isinstance(out, Fp8Rows), num_warps=4
    )  # fmt: skip
    return out


@triton.jit
def add_norm_kernel(
    p_stream, p_y, p_weight, p_out, p_values, p_scale, scale_stride, eps, D: tl.constexpr, PARTS: tl.constexpr,
    N: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Program t: stream += y, then its RMSNorm; PARTS tiles of N column blocks.

    A tile is as large as gives a lane four neighbours. Lanes with more would read fp32 in strides, and every change of
    type would pass through shared memory.
    """
    row = tl.program_id(0).to(tl.int64)
    o_part = tl.arange(0, N)[:, None] * B + tl.arange(0, B)[None, :]
    xs = ()  # concatenated below: Triton compiles no starred tuple
    ys = ()
    for part in tl.static_range(PARTS):  # all loads before the first store, which they could not pass
        o_d = part * N * B + o_part
        xs = xs + (tl.load(p_stream + row * D + o_d, mask=o_d < D, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        ys = ys + (tl.load(p_y + row * D + o_d, mask=o_d < D, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    sums = ()
    squares = tl.zeros([N, B], tl.float32)
    for part in tl.static_range(PARTS):
        o_d = part * N * B + o_part
        x = xs[part] + ys[part].to(tl.float32)  # type: ignore[var-annotated]
        tl.store(p_stream + row * D + o_d, x, mask=o_d < D)
        squares += x * x
        sums = sums + (x,)  # noqa: RUF005
    scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / D + eps)
    for part in tl.static_range(PARTS):
        o_d = part * N * B + o_part
        y = sums[part] * scale * (1.0 + tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32))
        if WIDE:
            tl.store(p_out + row * D + o_d, y.to(p_out.dtype.element_ty), mask=o_d < D)
        if FP8:
            store_fp8(y, p_values, p_scale, row, part * N, D // B, scale_stride, B, N, TILED)


def add_norm(
    stream: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    wide: torch.Tensor | None,
    fp8: Fp8Rows | None = None,
) -> None:
    """stream fp32 [T, D] += y [T, D]; its RMSNorm with weight [D] into `wide` [T, D], into `fp8`, or into both.

    In FP8, rows or tiles, D must be a multiple of 128. Twin: norm.rms_norm_naive.
    """
    rows, width = y.shape
    values, scales, stride = (stream, stream, 0) if fp8 is None else _places(fp8)
    add_norm_kernel[(rows,)](
        stream, y, weight, stream if wide is None else wide, values, scales, stride, eps, D=width,
        PARTS=triton.cdiv(width, NORM_WARPS * BLOCK), N=NORM_WARPS, B=BLOCK, WIDE=wide is not None,
        FP8=fp8 is not None, TILED=fp8 is not None and fp8.tiled, num_warps=NORM_WARPS,
    )  # fmt: skip


@triton.jit
def gated_norm_kernel(
    p_o, p_z, p_weight, p_out, p_scale, scale_stride, eps, stride, H: tl.constexpr, V: tl.constexpr,
    HEADS: tl.constexpr, B: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Programs (row, HEADS heads): normalise, times w, times silu(z)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    o_h = first + tl.arange(0, HEADS)
    o_v = tl.arange(0, V)
    inside = (o_h < H)[:, None]
    o = tl.load(p_o + row * H * V + o_h[:, None] * V + o_v[None, :], mask=inside, other=0.0).to(tl.float32)
    z = tl.load(p_z + row * stride + o_h[:, None] * V + o_v[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(p_weight + o_v).to(tl.float32)
    y = o * tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)[:, None] * weight[None, :] * (z * sigmoid(z))
    if FP8:
        blocks = tl.reshape(y, (HEADS * V // B, B))
        store_fp8(blocks, p_out, p_scale, row, first * V // B, H * V // B, scale_stride, B, HEADS * V // B)
    else:
        tl.store(p_out + row * H * V + o_h[:, None] * V + o_v[None, :], y.to(p_out.dtype.element_ty), mask=inside)


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, out: Out) -> Out:
    """o fp16 [T, H, V], z [T, H·V] (rows may be strided) → out [T, H·V]. Twin: gdn_verify.gated_norm_naive.

    In FP8 H·V must be a multiple of 128.
    """
    rows, heads, value_dim = o.shape
    values, scales, stride = _places(out)
    together = max(NORMED_HEADS, BLOCK // value_dim)  # whole blocks of 128 columns
    gated_norm_kernel[(rows, triton.cdiv(heads, together))](
        o, z, weight, values, scales, stride, eps, z.stride(0), H=heads, V=value_dim, HEADS=together, B=BLOCK,
        FP8=isinstance(out, Fp8Rows), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def gates_kernel(p_ba, p_a_log, p_dt_bias, p_g, p_beta, elements, H: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (block of rows × heads): g = −e^a_log · softplus(a + dt_bias), β = sigmoid(b)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    row = place // H
    head = place % H
    b = tl.load(p_ba + row * 2 * H + head, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(p_ba + row * 2 * H + H + head, mask=inside, other=0.0).to(tl.float32)
    a += tl.load(p_dt_bias + head, mask=inside, other=0.0)
    g = -tl.exp(tl.load(p_a_log + head, mask=inside, other=0.0)) * softplus(a)
    tl.store(p_g + place, g, mask=inside)
    tl.store(p_beta + place, 1.0 / (1.0 + tl.exp(-b)), mask=inside)


def prompt_gates(ba: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ba [T, 2H], b before a; a_log, dt_bias fp32 [H] → log decay g and beta, fp32 [T, H]. Twin: prompt_gates_naive."""
    rows, heads = len(ba), ba.shape[1] // 2
    g, beta = (torch.empty(rows, heads, dtype=torch.float32, device=ba.device) for _ in range(2))
    gates_kernel[(triton.cdiv(rows * heads, GATES_BLOCK),)](
        ba, a_log, dt_bias, g, beta, rows * heads, H=heads, BLOCK=GATES_BLOCK, num_warps=4
    )  # fmt: skip
    return g, beta


def prompt_gates_naive(
    ba: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin."""
    b, a = ba.float().chunk(2, 1)
    return log_gates_naive(b, a, a_log, dt_bias)


@triton.jit
def merge_kernel(
    p_one, p_one_log, p_other, p_other_log, p_gate, p_out, p_scale, scale_stride, rows, row_stride, head_stride,
    other_row_stride, other_head_stride, gate_stride, H: tl.constexpr, HEAD_BLOCK: tl.constexpr, D: tl.constexpr,
    HAS_OTHER: tl.constexpr, B: tl.constexpr, FP8: tl.constexpr,
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
        share = sigmoid(log - other_log)[:, None]
        o = o * share + other * (1.0 - share)
    gate = tl.load(p_gate + row * gate_stride + (2 * o_h[:, None] + 1) * D + o_d[None, :], mask=inside, other=0.0)
    y = o * sigmoid(gate.to(tl.float32))
    if FP8:
        blocks = tl.reshape(y, (HEAD_BLOCK * D // B, B))
        store_fp8(blocks, p_out, p_scale, row, 0, H * D // B, scale_stride, B, HEAD_BLOCK * D // B)
    else:
        tl.store(p_out + row * H * D + o_h[:, None] * D + o_d[None, :], y.to(p_out.dtype.element_ty), mask=inside)


Part = tuple[torch.Tensor, torch.Tensor | None]  # attention output [H, T, D], log of the softmax's sum fp32 [H, T]


def merge_and_gate(one: Part, other: Part | None, qkv: torch.Tensor, out: Out) -> Out:
    """Attention over one or two disjoint sets of keys, times sigmoid(gate) → out [T, H·D].

    qkv [T, …]: per query head [q ‖ gate]. The last dimension of the outputs is contiguous; a single part needs no sum.
    In FP8 H·D must be a multiple of 128.
    """
    heads, rows, dim = one[0].shape
    second = one if other is None else other
    values, scales, stride = _places(out)
    merge_kernel[(rows,)](
        one[0], qkv if one[1] is None else one[1], second[0], qkv if second[1] is None else second[1], qkv, values,
        scales, stride, rows, one[0].stride(1), one[0].stride(0), second[0].stride(1), second[0].stride(0),
        qkv.stride(0), H=heads, HEAD_BLOCK=triton.next_power_of_2(heads), D=dim, HAS_OTHER=other is not None, B=BLOCK,
        FP8=isinstance(out, Fp8Rows), num_warps=8,
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
    swiglu(empty(64, 34816, dtype=bf16), empty(64, 17408, dtype=bf16))
    gated_norm(
        empty(64, 48, 128), empty(64, 6144, dtype=bf16), empty(128, dtype=bf16), 1e-6, empty(64, 6144, dtype=bf16)
    )
    prompt_gates(empty(64, 96, dtype=bf16), empty(48, dtype=fp32), empty(48, dtype=fp32))
    rows = empty(64, 5120, dtype=bf16)
    add_norm(empty(64, 5120, dtype=fp32), rows, empty(5120, dtype=bf16), 1e-6, wide=rows)
    part = (empty(24, 64, 256), empty(24, 64, dtype=fp32))
    merge_and_gate(part, part, empty(64, 14336, dtype=bf16), empty(64, 6144, dtype=bf16))
