"""Query and key norm, partial RoPE, and the write of keys and values into the cache."""

import torch
import triton
import triton.language as tl

from .launch import PLAIN, Launch, enter


def rope_tables(rotary_dim: int, theta: float, length: int, device: torch.device | str) -> torch.Tensor:
    """cos ‖ sin [length, rotary_dim] of every position: computed in fp32, rounded to bf16 as the reference does."""
    inverse = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim)
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inverse
    return torch.cat([angle.cos(), angle.sin()], dim=-1).to(torch.bfloat16)


def rope_naive(x: torch.Tensor, weight: torch.Tensor, eps: float, table: torch.Tensor) -> torch.Tensor:
    """Twin: x [R, H, D], weight [D], table rows of the R positions → normed and turned, in x's dtype."""
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + weight.float())).to(x.dtype).float()
    half = table.shape[1] // 2
    cos, sin = table.float()[:, None, :half], table.float()[:, None, half:]
    left, right = normed[..., :half], normed[..., half : 2 * half]
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin, normed[..., 2 * half :]], dim=-1)
    return turned.to(x.dtype)


@triton.jit
def norm_and_turn(p_x, p_weight, p_table, o_d, eps, D: tl.constexpr, HALF: tl.constexpr):
    """One head: RMSNorm over D, then half-rotation of the first 2·HALF dimensions."""
    dtype = p_x.dtype.element_ty
    x = tl.load(p_x + o_d).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    weight = 1.0 + tl.load(p_weight + o_d).to(tl.float32)
    y = (x * scale * weight).to(dtype).to(tl.float32)
    turns = o_d < 2 * HALF
    o_partner = tl.where(turns, (o_d + HALF) % (2 * HALF), o_d)
    partner = tl.load(p_x + o_partner).to(tl.float32) * scale
    partner = (partner * (1.0 + tl.load(p_weight + o_partner).to(tl.float32))).to(dtype).to(tl.float32)
    o_angle = tl.where(turns, o_d % HALF, 0)
    cos = tl.load(p_table + o_angle).to(tl.float32)
    sin = tl.load(p_table + HALF + o_angle).to(tl.float32)
    sin = tl.where(o_d < HALF, -sin, sin)
    return tl.where(turns, y * cos + partner * sin, y).to(dtype)


@triton.jit
def rope_qk_kernel(
    p_qkv, p_norm_q, p_norm_k, p_table, p_positions, p_q, p_keys, p_values, eps,
    SLOT: tl.constexpr, OFFSET: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, CAPACITY: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (r, j): query heads, then key heads, then value heads of row r."""
    program = tl.program_id(0)
    JOBS: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    row = program // JOBS
    job = program % JOBS
    o_d = tl.arange(0, D)
    enter(PDL)
    position = tl.load(p_positions + SLOT) + OFFSET + row
    p_row = p_qkv + row * ((2 * Q_HEADS + 2 * KV_HEADS) * D)
    p_angles = p_table + position * (2 * HALF)
    if job < Q_HEADS:
        q = norm_and_turn(p_row + job * 2 * D, p_norm_q, p_angles, o_d, eps, D, HALF)
        tl.store(p_q + (row * Q_HEADS + job) * D + o_d, q)
    elif job < Q_HEADS + KV_HEADS:
        head = job - Q_HEADS
        k = norm_and_turn(p_row + (2 * Q_HEADS + head) * D, p_norm_k, p_angles, o_d, eps, D, HALF)
        tl.store(p_keys + (head.to(tl.int64) * CAPACITY + position) * D + o_d, k)
    else:
        head = job - Q_HEADS - KV_HEADS
        v = tl.load(p_row + (2 * Q_HEADS + KV_HEADS + head) * D + o_d)
        tl.store(p_values + (head.to(tl.int64) * CAPACITY + position) * D + o_d, v)


def rope_qk(
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
    offset: int = 0,
    launch: Launch = PLAIN,
) -> None:
    """qkv [R, (2·Hq + 2·Hkv)·D]: per query head [q ‖ gate], then keys, then values → q [R, Hq, D], cache rows written.

    Row r stands at positions[slot] + offset + r. table [≥ positions, rotary_dim] from rope_tables; keys, values
    [Hkv, capacity, D].
    """
    rows = qkv.shape[0]
    kv_heads, capacity, head_dim = keys.shape
    q_heads = q.shape[1]
    rope_qk_kernel[(rows * (q_heads + 2 * kv_heads),)](
        qkv, norm_q, norm_k, table, positions, q, keys, values, eps=eps, SLOT=slot, OFFSET=offset,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, CAPACITY=capacity, D=head_dim, HALF=table.shape[1] // 2, num_warps=4,
        **launch.arguments(),
    )  # fmt: skip
