"""Query and key norm, partial RoPE and the write of keys and values for the rows of a prompt, several heads a program.

rope_qk gives every head a program of its own, which suits the few rows of a step: the 262,144 programs of 8,192 rows
took 226 µs on an H200 where the bytes take 65.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

JOBS = 4  # heads a program, which is one warp: tiles of one row and of four then lie in the same lanes


@triton.jit
def prompt_rope_kernel(
    p_qkv, p_norm_q, p_norm_k, p_table, p_positions, p_q, p_keys, p_values, eps, stride, SLOT: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, CAPACITY: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    JOBS: tl.constexpr,
):  # fmt: skip
    """Programs (row, JOBS heads): query heads, then key heads, then value heads; a program may hold several kinds."""
    dtype = p_qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    job = (tl.program_id(1) * JOBS + tl.arange(0, JOBS))[:, None]
    o_d = tl.arange(0, D)[None, :]
    is_query = job < Q_HEADS
    is_key = (job >= Q_HEADS) & (job < Q_HEADS + KV_HEADS)
    is_value = (job >= Q_HEADS + KV_HEADS) & (job < Q_HEADS + 2 * KV_HEADS)
    # A query head is followed by its gate; keys and values lie behind all of them.
    p_head = p_qkv + row * stride + tl.where(is_query, 2 * job, Q_HEADS + job) * D
    x = tl.load(p_head + o_d, mask=job < Q_HEADS + 2 * KV_HEADS, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
    y = (wide * scale * _gain(p_norm_q, p_norm_k, o_d, is_query)).to(dtype).to(tl.float32)
    turns = o_d < 2 * HALF
    o_partner = tl.where(turns, (o_d + HALF) % (2 * HALF), o_d)
    partner = tl.load(p_head + o_partner, mask=turns & (is_query | is_key), other=0.0).to(tl.float32)
    partner = (partner * scale * _gain(p_norm_q, p_norm_k, o_partner, is_query)).to(dtype).to(tl.float32)
    position = tl.load(p_positions + SLOT) + row
    p_angle = p_table + position * (2 * HALF) + o_d % HALF
    cos = tl.load(p_angle, mask=turns, other=0.0).to(tl.float32)
    sin = tl.load(p_angle + HALF, mask=turns, other=0.0).to(tl.float32)
    sin = tl.where(o_d < HALF, -sin, sin)
    turned = tl.where(turns, y * cos + partner * sin, y).to(dtype)
    tl.store(p_q + (row * Q_HEADS + job) * D + o_d, turned.to(p_q.dtype.element_ty), mask=is_query)
    key = ((job - Q_HEADS) * CAPACITY + position) * D + o_d
    tl.store(p_keys + key, turned.to(p_keys.dtype.element_ty), mask=is_key)
    value = ((job - Q_HEADS - KV_HEADS) * CAPACITY + position) * D + o_d
    tl.store(p_values + value, x.to(p_values.dtype.element_ty), mask=is_value)


@triton.jit
def _gain(p_norm_q, p_norm_k, o_d, is_query):
    """1 + the norm's weight of each head's kind."""
    q = tl.load(p_norm_q + o_d).to(tl.float32)
    k = tl.load(p_norm_k + o_d).to(tl.float32)
    return 1.0 + tl.where(is_query, q, k)


def prompt_rope(
    qkv: torch.Tensor,
    norm_q: torch.Tensor,
    norm_k: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    slot: int = 0,
) -> None:
    """As rope_qk: qkv [T, (2·Hq + 2·Hkv)·D], per query head [q ‖ gate] → q [T, Hq, D] and cache rows, any T.

    Row r stands at positions[slot] + r. table [≥ positions, rotary_dim] from rope_tables; keys, values
    [Hkv, capacity, D]. Twin: rope_qk.rope_naive.
    """
    rows, heads = len(qkv), q.shape[1]
    kv_heads, capacity, dim = keys.shape
    prompt_rope_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, JOBS))](
        qkv, norm_q, norm_k, table, positions, q, keys, values, eps, qkv.stride(0), SLOT=slot, Q_HEADS=heads,
        KV_HEADS=kv_heads, CAPACITY=capacity, D=dim, HALF=table.shape[1] // 2, JOBS=JOBS, num_warps=1,
    )  # fmt: skip


def example_launches(empty: Callable[..., torch.Tensor]) -> None:
    """The kernel at the 27B shapes, for the compile check."""
    qkv, norm = empty(64, 14336, dtype=torch.bfloat16), empty(256, dtype=torch.bfloat16)
    positions, table = empty(4, dtype=torch.int32), empty(1024, 64, dtype=torch.bfloat16)
    keys, values = empty(4, 1024, 256), empty(4, 1024, 256)
    prompt_rope(qkv, norm, norm, 1e-6, table, positions, empty(64, 24, 256), keys, values)
