"""The gated delta rule for training: chunks of 64 tokens, batched matrix products, one short scan over chunks.

    S_t = e^{g_t} S_{t-1};  S_t += k_t (beta_t (v_t - S_t^T k_t))^T;  o_t = S_t^T q_t

Inside a chunk the updates solve a unit lower triangular system (the WY form of "Gated Delta Networks", Yang et al.
2024, section 3.3); between chunks only the state moves. Tokens lie flat, [chunks, heads, 64, dim]: a chunk never
spans two sequences because sequence lengths are multiples of 64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 64


class ChunkTerms(NamedTuple):
    """What the scan and the output need; c chunks, h heads, 64 tokens, k and v head dimensions, all fp32."""

    erase: Tensor  # [c, h, 64, k] what the old state is multiplied by and taken off the new values
    write: Tensor  # [c, h, 64, v] new values, as if the state before the chunk were zero
    keys: Tensor  # [c, h, 64, k] keys, decayed to the end of the chunk
    decay: Tensor  # [c, h] decay over the whole chunk
    queries: Tensor  # [c, h, 64, k] queries, decayed from the start of the chunk
    attention: Tensor  # [c, h, 64, 64] q k^T inside the chunk, causal, with decay


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower triangular [..., 64, 64] matrices.

    Block sizes double: with T the inverse of the diagonal blocks and O the blocks below them, T - T O T is the
    inverse of blocks twice the size. This is substitution in another order, so nothing grows as powers of L would.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        index = torch.arange(size, device=lower.device)
        inverse = torch.eye(size, device=lower.device, dtype=lower.dtype).expand_as(lower)
        block = 1
        while block < size:
            same_pair = index[:, None] // (2 * block) == index[None, :] // (2 * block)
            below = same_pair & (index[:, None] // block != index[None, :] // block)
            off_diagonal = torch.where(below, lower, 0.0)
            inverse = inverse - (off_diagonal if block == 1 else inverse @ off_diagonal @ inverse)
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        gradient: Tensor = -(transposed @ grads[0] @ transposed).tril(-1)
        return gradient


def chunk_terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> ChunkTerms:
    """Everything of the delta rule that needs no state. q, k: [c, h, 64, k] (normalised, q scaled), v: [c, h, 64, v],
    g, beta: [c, h, 64]; all fp32."""
    total = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
    pairwise = torch.where(causal, total[..., :, None] - total[..., None, :], float("-inf")).exp()
    k_beta = k * beta[..., None]
    lower = (k_beta @ k.transpose(-1, -2) * pairwise).tril(-1)
    inverse: Tensor = UnitLowerInverse.apply(lower)  # type: ignore[no-untyped-call]
    return ChunkTerms(
        erase=inverse @ (k_beta * total.exp()[..., None]),
        write=inverse @ (v * beta[..., None]),
        keys=k * (total[..., -1:] - total).exp()[..., None],
        decay=total[..., -1].exp(),
        queries=q * total.exp()[..., None],
        attention=q @ k.transpose(-1, -2) * pairwise,
    )


class StateScan(torch.autograd.Function):
    """States before each chunk, and each chunk's true new values. All arguments [chunks in order, b, ...].

    For chunk n: values_n = write_n - erase_n S_n;  S_{n+1} = decay_n S_n + keys_n^T values_n;  S_0 = 0.
    """

    @staticmethod
    def forward(ctx: Any, erase: Tensor, write: Tensor, keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        count, batch, _, k_dim = erase.shape
        states = erase.new_zeros(count + 1, batch, k_dim, write.shape[-1])
        values = torch.empty_like(write)
        for n in range(count):
            torch.baddbmm(write[n], erase[n], states[n], alpha=-1, out=values[n])
            decayed = states[n] * decay[n, :, None, None]
            torch.baddbmm(decayed, keys[n].transpose(1, 2), values[n], out=states[n + 1])
        ctx.save_for_backward(erase, keys, decay, states, values)
        return states[:-1], values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        erase, keys, decay, states, values = ctx.saved_tensors
        grad_states, grad_values_out = grads
        after = torch.empty_like(states[1:])  # gradient of the state after each chunk
        grad_values = torch.empty_like(values)
        flowing = torch.zeros_like(states[0])
        for n in reversed(range(len(erase))):
            after[n] = flowing
            torch.baddbmm(grad_values_out[n], keys[n], flowing, out=grad_values[n])
            kept = torch.addcmul(grad_states[n], flowing, decay[n, :, None, None])
            flowing = torch.baddbmm(kept, erase[n].transpose(1, 2), grad_values[n], alpha=-1)
        grad_erase = -(grad_values @ states[:-1].transpose(-1, -2))
        grad_keys = values @ after.transpose(-1, -2)
        grad_decay = (states[:-1] * after).sum((-1, -2))
        return grad_erase, grad_values, grad_keys, grad_decay


def scan_chunks(terms: ChunkTerms, sequences: int) -> tuple[Tensor, Tensor]:
    """Runs the scan over flat chunks of `sequences` equal sequences: (states [c, h, k, v], values [c, h, 64, v])."""

    def in_order(x: Tensor) -> Tensor:  # [sequences * n, h, ...] -> [n, sequences * h, ...]
        heads = x.shape[1]
        return x.view(sequences, -1, *x.shape[1:]).transpose(0, 1).reshape(-1, sequences * heads, *x.shape[2:])

    def flat(x: Tensor) -> Tensor:
        return x.reshape(len(x), sequences, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)

    states, values = StateScan.apply(  # type: ignore[no-untyped-call]
        *(in_order(t) for t in (terms.erase, terms.write, terms.keys, terms.decay))
    )
    return flat(states), flat(values)


def chunk_outputs(terms_queries: Tensor, attention: Tensor, states: Tensor, values: Tensor) -> Tensor:
    """o: [c, h, 64, v], from the state before each chunk and what the chunk itself wrote."""
    return terms_queries @ states + attention @ values
