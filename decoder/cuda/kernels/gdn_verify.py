"""Gated DeltaNet recurrence for the rows of one verify step, with lazy commit of the state, and the gated norm.

A program holds 16 columns of one head's state: it replays the rows accepted last time from their stored keys and
values, writes the state once, then runs the new rows in registers only. Replayed and new rows go through the same loop
of the same binary for every row count, so neither state nor output depends on how tokens were grouped into steps.
"""

import torch
import triton
import triton.language as tl

from .gdn_prepare import GdnCache
from .launch import LENGTH, PLAIN, RING, STATE_LENGTH, Launch, enter

COLUMNS = 16  # of the state, a program: one warp, 64 registers a thread


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
def absorb(state, k, v, decay, beta):
    """One token of the gated delta rule: state [K, V], k [K], v [V]."""
    state = state * decay
    delta = (v - tl.sum(state * k[:, None], axis=0)) * beta
    return state + k[:, None] * delta[None, :]


@triton.jit(do_not_specialize=["rows"])  # one binary for every row count, so that a row never depends on it
def recur_kernel(
    p_q, p_k, p_v, p_decay, p_beta, p_state, p_out, p_positions, rows,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VB: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs (column block, value head). The next token's vectors are loaded while this one's are used."""
    program = tl.program_id(0)
    BLOCKS: tl.constexpr = V // VB
    head = program // BLOCKS
    key_head = head // (H // KEY_HEADS)
    o_k = tl.arange(0, K)
    o_v = (program % BLOCKS) * VB + tl.arange(0, VB)
    p_own_state = p_state + head * K * V + o_k[:, None] * V + o_v[None, :]
    p_k += key_head * K
    p_v += head * V
    p_decay += head
    p_beta += head
    p_q += key_head * K
    # State, lengths and the rows to replay are of earlier steps: only the new rows wait for the kernel before.
    state = tl.load(p_own_state)
    start = tl.load(p_positions + STATE_LENGTH)
    replays = tl.load(p_positions + LENGTH) - start
    slot = start % RING
    k = tl.load(p_k + slot * KEY_HEADS * K + o_k)
    v = tl.load(p_v + slot * H * V + o_v)
    decay = tl.load(p_decay + slot * H)
    beta = tl.load(p_beta + slot * H)
    q = tl.zeros([K], tl.float32)
    for i in range(replays + rows):
        if i == replays:
            if i > 0:
                tl.store(p_own_state, state)
            enter(PDL)
            slot = (start + i) % RING
            k = tl.load(p_k + slot * KEY_HEADS * K + o_k)
            v = tl.load(p_v + slot * H * V + o_v)
            decay = tl.load(p_decay + slot * H)
            beta = tl.load(p_beta + slot * H)
            q = tl.load(p_q + o_k)
        next_slot = (start + i + 1) % RING
        next_k = tl.load(p_k + next_slot * KEY_HEADS * K + o_k)
        next_v = tl.load(p_v + next_slot * H * V + o_v)
        next_decay = tl.load(p_decay + next_slot * H)
        next_beta = tl.load(p_beta + next_slot * H)
        next_row = tl.minimum(tl.maximum(i + 1 - replays, 0), rows - 1)
        next_q = tl.load(p_q + next_row * KEY_HEADS * K + o_k)
        state = absorb(state, k, v, decay, beta)
        if i >= replays:
            o = tl.sum(state * q[:, None], axis=0)
            tl.store(p_out + ((i - replays) * H + head) * V + o_v, o)
        k, v, decay, beta, q = next_k, next_v, next_decay, next_beta, next_q


@triton.jit
def gate_output_kernel(
    p_o, p_z, p_norm, p_out, eps, stride, H: tl.constexpr, V: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (row, head): normalise, times w, times silu(z)."""
    program = tl.program_id(0)
    o_v = tl.arange(0, V)
    weight = tl.load(p_norm + o_v).to(tl.float32)
    enter(PDL)
    o = tl.load(p_o + program * V + o_v)
    z = tl.load(p_z + (program // H) * stride + (program % H) * V + o_v).to(tl.float32)
    y = o * tl.rsqrt(tl.sum(o * o, axis=0) / V + eps) * weight * (z / (1.0 + tl.exp(-z)))
    tl.store(p_out + program * V + o_v, y.to(p_out.dtype.element_ty))


def gdn_recur(
    q: torch.Tensor,
    cache: GdnCache,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    launch: Launch = PLAIN,
    columns: int = COLUMNS,
) -> None:
    """q fp32 [≥ R, key heads, K] and the cache as gdn_prepare left them → out fp32 [R, H, V].

    Tokens STATE_LENGTH … LENGTH − 1 are folded into the state here, the new rows are not.
    """
    heads, key_dim, value_dim = cache.state.shape
    block = min(columns, value_dim)
    recur_kernel[(heads * value_dim // block,)](
        q, cache.k, cache.v, cache.decay, cache.beta, cache.state, out, positions, rows=out.shape[0], H=heads,
        KEY_HEADS=cache.k.shape[1], K=key_dim, V=value_dim, VB=block, num_warps=1, **launch.arguments(),
    )  # fmt: skip


def gate_output(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, launch: Launch = PLAIN
) -> None:
    """o fp32 [R, H, V], z [R, H·V] (rows may be strided) → out [R, H·V]. Twin: gated_norm_naive."""
    rows, heads, value_dim = o.shape
    gate_output_kernel[(rows * heads,)](
        o, z, weight, out, eps=eps, stride=z.stride(0), H=heads, V=value_dim, num_warps=1,
        **launch.arguments(),
    )  # fmt: skip
