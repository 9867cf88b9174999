"""Split-KV attention for 1 … 16 verify rows, and the combine with the output gate.

Segment s of a kv head reads the key blocks s, s + segments, s + 2·segments, …: which block belongs to which segment,
and the order inside it, depend on neither the length nor the number of rows, so a row's result never does either.
"""

import torch
import triton
import triton.language as tl

from .launch import PLAIN, Launch, enter

ROW_TILE = 32  # (row, query head of the group) pairs a program holds; wider steps use more tiles of the same shape
BLOCK_KEYS = 64


def verify_attention_naive(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, base: int, gate: torch.Tensor
) -> torch.Tensor:
    """Twin: q, gate [R, Hq, D], keys and values [Hkv, ≥ base + R, D] → [R, Hq, D]; row r sees positions ≤ base + r."""
    rows, q_heads, head_dim = q.shape
    group = q_heads // keys.shape[0]
    out = torch.empty_like(q, dtype=torch.float32)
    for row in range(rows):
        seen = base + row + 1
        k = keys[:, :seen].float().repeat_interleave(group, 0)
        v = values[:, :seen].float().repeat_interleave(group, 0)
        scores = torch.einsum("hd,hkd->hk", q[row].float(), k) * head_dim**-0.5
        out[row] = torch.einsum("hk,hkd->hd", scores.softmax(-1), v)
    return (out.to(q.dtype).float() * torch.sigmoid(gate.float()).to(q.dtype).float()).to(q.dtype)


@triton.jit
def split_kernel(
    p_q, p_keys, p_values, p_positions, p_partial, p_max, p_sum, scale_log2,
    SLOT: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    CAPACITY: tl.constexpr, D: tl.constexpr, SEGMENTS: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (tile, kv head, segment): unnormalised output, running maximum and sum of one segment."""
    program = tl.program_id(0)
    tile = program % TILES
    head = (program // TILES) % KV_HEADS
    segment = program // (TILES * KV_HEADS)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    TILE_ROWS: tl.constexpr = M // GROUP
    o_m = tl.arange(0, M)
    o_n = tl.arange(0, N)
    o_d = tl.arange(0, D)
    row = tile * TILE_ROWS + o_m // GROUP
    held = (o_m < TILE_ROWS * GROUP) & (row < ROWS)
    o_head = row * Q_HEADS + head * GROUP + o_m % GROUP
    enter(PDL)
    base = tl.load(p_positions + SLOT) + OFFSET
    q = tl.load(p_q + o_head[:, None] * D + o_d[None, :], mask=held[:, None], other=0.0)
    p_keys += head.to(tl.int64) * CAPACITY * D
    p_values += head.to(tl.int64) * CAPACITY * D
    end = base + ROWS
    acc = tl.zeros([M, D], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    for start in range(segment * N, end, SEGMENTS * N):
        at = start + o_n
        k = tl.load(p_keys + at[None, :] * D + o_d[:, None], mask=(at < end)[None, :], other=0.0)
        scores = tl.dot(q, k) * scale_log2
        scores = tl.where(at[None, :] <= (base + row)[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(scores - pivot[:, None])
        rescale = tl.exp2(top - pivot)
        v = tl.load(p_values + at[:, None] * D + o_d[None, :], mask=(at < end)[:, None], other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None])
        total = total * rescale + tl.sum(weight, axis=1)
        top = new_top
    o_part = segment * (ROWS * Q_HEADS) + o_head
    tl.store(p_max + o_part, top, mask=held)
    tl.store(p_sum + o_part, total, mask=held)
    if segment * N < end:
        tl.store(p_partial + o_part[:, None] * D + o_d[None, :], acc, mask=held[:, None])


@triton.jit
def combine_kernel(
    p_partial, p_max, p_sum, p_gate, p_out, gate_stride,
    HEADS: tl.constexpr, Q_HEADS: tl.constexpr, D: tl.constexpr, SEGMENTS: tl.constexpr, S_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, query head): the segments in order, then the sigmoid gate. Empty segments weigh exactly 0."""
    program = tl.program_id(0)
    o_s = tl.arange(0, S_BLOCK)
    o_d = tl.arange(0, D)
    enter(PDL)
    tops = tl.load(p_max + o_s * HEADS + program, mask=o_s < SEGMENTS, other=float("-inf"))
    sums = tl.load(p_sum + o_s * HEADS + program, mask=o_s < SEGMENTS, other=0.0)
    weights = tl.exp2(tops - tl.max(tops, axis=0))
    held = (weights > 0)[:, None]
    parts = tl.load(p_partial + (o_s * HEADS + program)[:, None] * D + o_d[None, :], mask=held, other=0.0)
    o = tl.sum(parts * weights[:, None], axis=0) / tl.sum(sums * weights, axis=0)
    dtype = p_out.dtype.element_ty
    p_own_gate = p_gate + (program // Q_HEADS) * gate_stride + (program % Q_HEADS) * 2 * D + D
    gate = tl.load(p_own_gate + o_d).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(p_out + program * D + o_d, (o.to(dtype).to(tl.float32) * gate).to(dtype))


def segments_for(num_multiprocessors: int, kv_heads: int) -> int:
    """Segments a kv head, from the card alone: one wave of programs over all multiprocessors."""
    return max(1, num_multiprocessors // kv_heads)


def verify_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    qkv: torch.Tensor,
    partial: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    *,
    segments: int,
    block_keys: int = BLOCK_KEYS,
    num_stages: int = 3,
    slot: int = 0,
    offset: int = 0,
    launch: Launch = PLAIN,
) -> None:
    """q [R, Hq, D] at positions[slot] + offset + r, keys and values [Hkv, capacity, D] → out [R, Hq·D].

    qkv [R, …]: the projection whose query heads are followed by their gates. Scratch fp32, any content:
    partial [≥ segments·R·Hq·D], top and total [≥ segments·R·Hq].
    """
    rows, q_heads, head_dim = q.shape
    kv_heads, capacity, _ = keys.shape
    group = q_heads // kv_heads
    tile_rows = ROW_TILE // group
    tiles = -(-rows // tile_rows)
    split_kernel[(tiles * kv_heads * segments,)](
        q, keys, values, positions, partial, top, total, scale_log2=head_dim**-0.5 * 1.4426950408889634, SLOT=slot,
        OFFSET=offset, ROWS=rows, Q_HEADS=q_heads, KV_HEADS=kv_heads, CAPACITY=capacity, D=head_dim, SEGMENTS=segments,
        TILES=tiles, M=ROW_TILE, N=block_keys, num_warps=4, num_stages=num_stages, **launch.arguments(),
    )  # fmt: skip
    combine_kernel[(rows * q_heads,)](
        partial, top, total, qkv, out, gate_stride=qkv.stride(0), HEADS=rows * q_heads, Q_HEADS=q_heads, D=head_dim,
        SEGMENTS=segments, S_BLOCK=triton.next_power_of_2(segments), num_warps=4, **launch.arguments(),
    )  # fmt: skip
