"""Gated DeltaNet for the rows of one verify step, with lazy commit of the state.

One program a value head: gates, convolution and norms of the new rows, replay of the rows accepted last time from
their stored keys and values, one write of the state, then the new rows in registers only. A row's arithmetic is the
same loop body whether it is replayed or new, so the state never depends on how tokens were grouped into steps.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import LENGTH, PLAIN, RING, STATE_LENGTH, Launch, enter, prefetch_l2
from .linear import X_SCALE

SCALE = tl.constexpr(X_SCALE)


def gates_naive(
    x: torch.Tensor, w_b: torch.Tensor, w_a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of the gates: normed x [R, D], w_b and w_a [H, D] → (decay e^g, beta), each fp32 [R, H]."""
    b, a = (x.float() @ w.float().T for w in (w_b, w_a))
    g = -torch.exp(a_log.float()) * torch.nn.functional.softplus(a + dt_bias.float())
    return torch.exp(g), torch.sigmoid(b)


def conv_naive(history: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Twin of the convolution and silu: history [W − 1, C], rows [R, C] before activation, weight [C, W] → [R, C]."""
    x = torch.cat([history, rows]).float()
    taps = weight.shape[1]
    out = sum(x[tap : tap + len(rows)] * weight[:, tap].float() for tap in range(taps))
    return torch.nn.functional.silu(torch.as_tensor(out)).to(rows.dtype)


def delta_rule_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of the recurrence, token by token: q, k [T, H, K], v [T, H, V], decay, beta [T, H], state [H, K, V] fp32.

    q and k come normed and scaled. Returns ([T, H, V], the new state). Source: MODEL section 1.
    """
    out = []
    for t in range(len(q)):
        state = state * decay[t, :, None, None]
        delta = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t, :, None]
        state = state + k[t, :, :, None] * delta[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out), state


def gated_norm_naive(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Twin of the gated norm: o, z [..., V] in the model's dtype, plain weight [V]."""
    wide = o.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(o.dtype)
    return ((weight.to(o.dtype) * normed).float() * torch.nn.functional.silu(z.float())).to(o.dtype)


@triton.jit
def softplus(x):
    """log(1 + e^x), linear where e^x would overflow."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def gate_rows(
    p_x, p_sumsq, p_w_b, p_w_a, p_a_log, p_dt_bias, head, o_row, eps,
    ROWS: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, SUMS_BLOCK: tl.constexpr,
):  # fmt: skip
    """(decay e^g, beta), each fp32 [RP], of one head; x and sumsq as linear.Norm describes them."""
    b = tl.zeros([o_row.shape[0], CHUNK], tl.float32)
    a = tl.zeros([o_row.shape[0], CHUNK], tl.float32)
    held = (o_row < ROWS)[:, None]
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


@triton.jit
def absorb(state, k, v, decay, beta):
    """One token of the gated delta rule: state [K, V], k [K], v [V]."""
    state = state * decay
    delta = (v - tl.sum(state * k[:, None], axis=0)) * beta
    return state + k[:, None] * delta[None, :]


@triton.jit
def gdn_verify_kernel(
    p_rows, p_x, p_sumsq, p_w_b, p_w_a, p_a_log, p_dt_bias, p_conv, p_norm,
    p_raw, p_q, p_k, p_v, p_decay, p_beta, p_state, p_out, p_positions, p_next, eps, q_scale,
    ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr,
    D: tl.constexpr, CHUNK: tl.constexpr, SUMS_BLOCK: tl.constexpr,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    NEXT_SHARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program h: value head h, which reads key head h // GROUP."""
    head = tl.program_id(0)
    if head >= H:
        prefetch_l2(p_next, head - H, NEXT_SHARE)
        return
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
    o_row = tl.arange(0, ROW_BLOCK)
    p_own_state = p_state + head * K * V + o_k[:, None] * V + o_v[None, :]
    state = tl.load(p_own_state)  # written a whole step ago: needs no wait
    gain = tl.load(p_norm + o_v)
    enter(PDL)
    length = tl.load(p_positions + LENGTH)
    start = tl.load(p_positions + STATE_LENGTH)

    key_head = head // GROUP
    first = head % GROUP == 0
    KEYS: tl.constexpr = (H // GROUP) * K
    q_rows = conv_rows(p_rows, p_raw, p_conv, o_row, key_head * K + o_k, length, first, ROWS, STRIDE, C, TAPS)
    k_rows = conv_rows(p_rows, p_raw, p_conv, o_row, KEYS + key_head * K + o_k, length, first, ROWS, STRIDE, C, TAPS)
    v_rows = conv_rows(p_rows, p_raw, p_conv, o_row, 2 * KEYS + head * V + o_v, length, True, ROWS, STRIDE, C, TAPS)
    decay_rows, beta_rows = gate_rows(
        p_x, p_sumsq, p_w_b, p_w_a, p_a_log, p_dt_bias, head, o_row, eps, ROWS, D, CHUNK, SUMS_BLOCK
    )
    o_slot = ((length + o_row) % RING) * H + head
    inside = (o_row < ROWS)[:, None]
    tl.store(p_decay + o_slot, decay_rows, mask=o_row < ROWS)
    tl.store(p_beta + o_slot, beta_rows, mask=o_row < ROWS)
    tl.store(p_q + (o_row[:, None] * H + head) * K + o_k[None, :], unit_rows(q_rows) * q_scale, mask=inside)
    tl.store(p_k + o_slot[:, None] * K + o_k[None, :], unit_rows(k_rows), mask=inside)
    tl.store(p_v + o_slot[:, None] * V + o_v[None, :], v_rows, mask=inside)
    tl.debug_barrier()

    for replayed in range(length - start):
        o_at = ((start + replayed) % RING) * H + head
        k = tl.load(p_k + o_at * K + o_k)
        v = tl.load(p_v + o_at * V + o_v)
        state = absorb(state, k, v, tl.load(p_decay + o_at), tl.load(p_beta + o_at))
    if start < length:
        tl.store(p_own_state, state)

    for row in range(ROWS):
        o_at = ((length + row) % RING) * H + head
        k = tl.load(p_k + o_at * K + o_k)
        v = tl.load(p_v + o_at * V + o_v)
        q = tl.load(p_q + (row * H + head) * K + o_k)
        z = tl.load(p_rows + row * STRIDE + C + head * V + o_v).to(tl.float32)
        state = absorb(state, k, v, tl.load(p_decay + o_at), tl.load(p_beta + o_at))
        o = tl.sum(state * q[:, None], axis=0).to(p_out.dtype.element_ty).to(tl.float32)
        normed = (o * tl.rsqrt(tl.sum(o * o, axis=0) / V + eps)).to(p_out.dtype.element_ty)
        y = (normed * gain.to(p_out.dtype.element_ty)).to(tl.float32) * (z / (1.0 + tl.exp(-z)))
        tl.store(p_out + (row * H + head) * V + o_v, y.to(p_out.dtype.element_ty))


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
    """State fp32 [H, K, V] of a layer, and rings by position: raw [32, C], k, v [32, H, ·], gates [32, H]."""

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
        return cls(
            zeros(heads, key_dim, value_dim),
            zeros(ring, channels, kind=dtype),
            zeros(ring, heads, key_dim),
            zeros(ring, heads, value_dim),
            zeros(ring, heads),
            zeros(ring, heads),
        )


def gdn_verify(
    rows: torch.Tensor,
    x: torch.Tensor,
    sumsq: torch.Tensor,
    weights: GdnWeights,
    cache: GdnCache,
    q: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    launch: Launch = PLAIN,
    num_warps: int = 8,
) -> None:
    """rows [R, C + H·V]: q ‖ k ‖ v before the convolution, then z; x fp16 [R, D] and sumsq [R, D/32]: what they were
    projected from, as linear.Norm describes it → out [R, H·V].

    q fp32 [16, H, K] is scratch. Tokens STATE_LENGTH … LENGTH − 1 are folded into the state here, the new rows are not.
    """
    num_rows, width = x.shape
    heads, key_dim, value_dim = cache.state.shape
    channels, taps = weights.conv.shape
    key_heads = (channels - heads * value_dim) // (2 * key_dim)
    gdn_verify_kernel[(heads + launch.extra_programs,)](
        rows, x, sumsq, weights.w_b, weights.w_a, weights.a_log, weights.dt_bias, weights.conv,
        weights.norm, cache.raw, q, cache.k, cache.v, cache.decay, cache.beta, cache.state, out, positions, eps=eps,
        q_scale=key_dim**-0.5, ROWS=num_rows, ROW_BLOCK=triton.next_power_of_2(num_rows), STRIDE=rows.stride(0),
        C=channels, TAPS=taps, D=width, CHUNK=min(1024, triton.next_power_of_2(width)),
        SUMS_BLOCK=triton.next_power_of_2(width // 32), H=heads,
        GROUP=heads // key_heads, K=key_dim, V=value_dim, num_warps=num_warps, **launch.arguments(rows),
    )  # fmt: skip
