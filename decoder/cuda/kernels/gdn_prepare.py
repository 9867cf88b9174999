"""Gated DeltaNet before the recurrence: the gates of every head, and the convolution and norms of the new rows."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import LENGTH, PLAIN, RING, Launch, ask_l2, enter
from .linear import X_SCALE

SCALE = tl.constexpr(X_SCALE)
ROW_BLOCK = 4  # rows a program


def gates_naive(
    x: torch.Tensor, w_b: torch.Tensor, w_a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of the gates: normed x [R, D], w_b and w_a [H, D] → (decay e^g, beta), each fp32 [R, H]."""
    b, a = (x.float() @ w.float().T for w in (w_b, w_a))
    g, beta = log_gates_naive(b, a, a_log.float(), dt_bias.float())
    return torch.exp(g), beta


def log_gates_naive(
    b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """b and a [R, H], the gates' products; a_log and dt_bias [H] → (log decay g, beta), each [R, H]."""
    return -torch.exp(a_log) * torch.nn.functional.softplus(a + dt_bias), torch.sigmoid(b)


def conv_naive(history: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Twin of the convolution and silu: history [W − 1, C], rows [R, C] before activation, weight [C, W] → [R, C]."""
    x = torch.cat([history, rows]).float()
    taps = weight.shape[1]
    out = sum(x[tap : tap + len(rows)] * weight[:, tap].float() for tap in range(taps))
    return torch.nn.functional.silu(torch.as_tensor(out)).to(rows.dtype)


@triton.jit
def softplus(x):
    """max(x, 0) + ln(1 + e^-|x|), this by its series where 1 + e would round: an error grows with every token."""
    e = tl.exp(-tl.abs(x))
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * 0.25)))
    return tl.maximum(x, 0.0) + tl.where(e < 1.0 / 64.0, series, tl.log(1.0 + e))


@triton.jit
def gate_rows(
    p_x, p_sumsq, p_w_b, p_w_a, p_a_log, p_dt_bias, head, o_row, eps, rows,
    D: tl.constexpr, CHUNK: tl.constexpr, SUMS_BLOCK: tl.constexpr,
):  # fmt: skip
    """(decay e^g, beta), each fp32 [RP], of one head; x and sumsq as linear.Norm describes them."""
    b = tl.zeros([o_row.shape[0], CHUNK], tl.float32)
    a = tl.zeros([o_row.shape[0], CHUNK], tl.float32)
    held = (o_row < rows)[:, None]
    for first in tl.static_range(0, D, CHUNK):
        o_d = first + tl.arange(0, CHUNK)
        inside = o_d < D
        w_b = tl.load(p_w_b + head * D + o_d, mask=inside, other=0.0).to(tl.float32)
        w_a = tl.load(p_w_a + head * D + o_d, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(p_x + o_row[:, None] * D + o_d[None, :], mask=held & inside[None, :], other=0.0).to(tl.float32)
        b += x * w_b[None, :]
        a += x * w_a[None, :]
    o_sum = tl.arange(0, SUMS_BLOCK)
    squares = tl.load(
        p_sumsq + o_row[:, None] * (D // 32) + o_sum[None, :], mask=held & (o_sum < D // 32)[None, :], other=0.0
    )
    scale = tl.rsqrt(tl.sum(squares, axis=1) / D + eps) / SCALE
    g = -tl.exp(tl.load(p_a_log + head)) * softplus(tl.sum(a, axis=1) * scale + tl.load(p_dt_bias + head))
    return tl.exp(g), 1.0 / (1.0 + tl.exp(-tl.sum(b, axis=1) * scale))


@triton.jit
def conv_rows(
    p_rows, p_raw, p_weight, o_row, channel, length, store_raw, rows,
    STRIDE: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Causal depthwise convolution and silu of the new rows for some channels: fp32 [RP, len(channel)].

    Rows before this step come from the ring by position; with store_raw the new rows are put there.
    """
    acc = tl.zeros([o_row.shape[0], channel.shape[0]], tl.float32)
    for tap in tl.static_range(TAPS):
        source = o_row - (TAPS - 1) + tap
        position = length + source
        new = (source >= 0) & (source < rows)
        old = (source < 0) & (position >= 0)
        x = tl.load(p_rows + source[:, None].to(tl.int64) * STRIDE + channel[None, :], mask=new[:, None], other=0.0)
        slot = (position + RING) % RING
        x_old = tl.load(p_raw + slot[:, None] * C + channel[None, :], mask=old[:, None], other=0.0)
        if tap == TAPS - 1:
            tl.store(p_raw + slot[:, None] * C + channel[None, :], x, mask=new[:, None] & store_raw)
        weight = tl.load(p_weight + channel * TAPS + tap).to(tl.float32)
        acc += (x.to(tl.float32) + x_old.to(tl.float32)) * weight[None, :]
    y = acc / (1.0 + tl.exp(-acc))
    return y.to(p_raw.dtype.element_ty).to(tl.float32)


@triton.jit
def unit_rows(x):
    """Each row over its Euclidean length: x·rsqrt(Σx² + 1e-6)."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit(do_not_specialize=["rows"])  # one binary for every row count, so that a row never depends on it
def gdn_prepare_kernel(
    p_rows, p_x, p_sumsq, p_w_b, p_w_a, p_a_log, p_dt_bias, p_conv, p_raw, p_q, p_k, p_v, p_decay, p_beta,
    p_positions, eps, q_scale, rows,
    ROW_BLOCK: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr,
    D: tl.constexpr, CHUNK: tl.constexpr, SUMS_BLOCK: tl.constexpr, H: tl.constexpr, KEY_HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs of a block of rows: the gates of each value head, then query heads, key heads and value heads of the
    convolution."""
    JOBS: tl.constexpr = 2 * H + 2 * KEY_HEADS
    block = tl.program_id(0) // JOBS
    program = tl.program_id(0) % JOBS
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
    o_row = block * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    inside = o_row < rows
    KEYS: tl.constexpr = KEY_HEADS * K
    if PDL and program < H and D % 1024 == 0:  # weights depend on nobody: on their way before the wait
        ask_l2(p_w_b + program * D, D // 64)
        ask_l2(p_w_a + program * D, D // 64)
    enter(PDL)
    length = tl.load(p_positions + LENGTH)
    o_slot = (length + o_row) % RING
    if program < H:
        decay, beta = gate_rows(
            p_x, p_sumsq, p_w_b, p_w_a, p_a_log, p_dt_bias, program, o_row, eps, rows, D, CHUNK, SUMS_BLOCK
        )
        tl.store(p_decay + o_slot * H + program, decay, mask=inside)
        tl.store(p_beta + o_slot * H + program, beta, mask=inside)
    elif program < H + KEY_HEADS:
        head = program - H
        q = conv_rows(p_rows, p_raw, p_conv, o_row, head * K + o_k, length, True, rows, STRIDE, C, TAPS)
        o_out = (o_row * KEY_HEADS + head)[:, None] * K + o_k[None, :]
        tl.store(p_q + o_out, unit_rows(q) * q_scale, mask=inside[:, None])
    elif program < H + 2 * KEY_HEADS:
        head = program - H - KEY_HEADS
        k = conv_rows(p_rows, p_raw, p_conv, o_row, KEYS + head * K + o_k, length, True, rows, STRIDE, C, TAPS)
        tl.store(p_k + (o_slot * KEY_HEADS + head)[:, None] * K + o_k[None, :], unit_rows(k), mask=inside[:, None])
    else:
        head = program - H - 2 * KEY_HEADS
        v = conv_rows(p_rows, p_raw, p_conv, o_row, 2 * KEYS + head * V + o_v, length, True, rows, STRIDE, C, TAPS)
        tl.store(p_v + (o_slot * H + head)[:, None] * V + o_v[None, :], v, mask=inside[:, None])


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """What a GDN layer needs besides its large projections."""

    w_b: torch.Tensor  # [H, D] bf16
    w_a: torch.Tensor  # [H, D] bf16
    a_log: torch.Tensor  # [H] fp32
    dt_bias: torch.Tensor  # [H] fp32
    conv: torch.Tensor  # [C, W] fp32
    norm: torch.Tensor  # [V], the gated norm


@dataclass(frozen=True, slots=True)
class GdnCache:
    """State fp32 [H, K, V] of a layer; rings by position: raw [32, C], k [32, key heads, K], v [32, H, V], gates."""

    state: torch.Tensor
    raw: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def allocate(
        cls, heads: int, key_dim: int, value_dim: int, channels: int, dtype: torch.dtype, device: torch.device
    ) -> "GdnCache":
        """Zeroed; `dtype` is that of the projections."""

        def zeros(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        ring = RING.value
        key_heads = (channels - heads * value_dim) // (2 * key_dim)
        return cls(
            zeros(heads, key_dim, value_dim),
            zeros(ring, channels, kind=dtype),
            zeros(ring, key_heads, key_dim),
            zeros(ring, heads, value_dim),
            zeros(ring, heads),
            zeros(ring, heads),
        )


def gdn_prepare(
    rows: torch.Tensor,
    x: torch.Tensor,
    sumsq: torch.Tensor,
    weights: GdnWeights,
    cache: GdnCache,
    q: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    *,
    launch: Launch = PLAIN,
) -> None:
    """rows [R, ≥ C]: q ‖ k ‖ v before the convolution; x fp16 [R, D], sumsq [R, D/32]: what they were projected from.

    Fills q fp32 [R, key heads, K] and the cache's rings at positions LENGTH … LENGTH + R − 1.
    """
    num_rows, width = x.shape
    heads, key_dim, value_dim = cache.state.shape
    channels, taps = weights.conv.shape
    key_heads = cache.k.shape[1]
    blocks = triton.cdiv(num_rows, ROW_BLOCK)
    gdn_prepare_kernel[(blocks * (2 * heads + 2 * key_heads),)](
        rows, x, sumsq, weights.w_b, weights.w_a, weights.a_log, weights.dt_bias, weights.conv, cache.raw, q, cache.k,
        cache.v, cache.decay, cache.beta, positions, eps=eps, q_scale=key_dim**-0.5, rows=num_rows,
        ROW_BLOCK=ROW_BLOCK, STRIDE=rows.stride(0), C=channels, TAPS=taps, D=width,
        CHUNK=min(1024, triton.next_power_of_2(width)), SUMS_BLOCK=triton.next_power_of_2(width // 32), H=heads,
        KEY_HEADS=key_heads, K=key_dim, V=value_dim, num_warps=4, **launch.arguments(),
    )  # fmt: skip
