"""Gated DeltaNet: a short causal convolution, then a linear-attention state updated by the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from ..checkpoint.config import ModelConfig
from .cache import DeltaNetState, DeltaUpdate, PendingRows
from .norm import FoldedNorm, root_eps, unit

Weights = Mapping[str, torch.Tensor]

CHUNK = 64  # rows solved together in prefill
L2_EPS = 1e-6


def delta_rule(
    qk: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, DeltaUpdate]:
    """One chunk of the gated delta rule, all rows at once (the WY form of Gated DeltaNet, arXiv 2412.06464).

    qk: [heads, 2, C, Dk], queries and unit keys. v: [heads, C, Dv]. g: [heads, 1, C, 1]. beta: [heads, C, 1]. state: S
    before the chunk, [heads, Dk, Dv], left as it is. Returns (output [heads, C, Dv], what the rows would do to S).

    Row by row, Δ_i = β_i (v_i − S_{i−1}ᵀ k_i e^{g_i}) and S_i = S_{i−1} e^{g_i} + k_i Δ_iᵀ. With G the running sum of g
    that is a unit lower triangular system (I + A) Δ = β (V − e^G K S) where A_ij = β_i e^{G_i − G_j} k_i·k_j for j < i.
    """
    heads, _, rows, key_dim = qk.shape
    stacked, keys = qk.view(heads, 2 * rows, key_dim), qk.select(1, 1)
    total = g.cumsum(2)
    decay = (total - total.mT).exp_().tril_()  # [heads, 1, C, C], e^{G_i − G_j} for j ≤ i
    from_start = total.exp_()  # [heads, 1, C, 1]
    q_products, k_products = torch.bmm(stacked, keys.mT).view(heads, 2, rows, rows).mul_(decay).unbind(1)
    q_reads, k_reads = torch.bmm(stacked, state).view(heads, 2, rows, -1).mul_(from_start).unbind(1)
    system, right = k_products * beta, (v - k_reads).mul_(beta)  # the system's diagonal is not read
    deltas = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return torch.baddbmm(q_reads, q_products, deltas), DeltaUpdate(keys, deltas, decay, from_start)


class GatedDeltaNet:
    """qkv ‖ z ‖ b ‖ a in one projection; value head h reads key head h // (value heads / key heads)."""

    def __init__(self, config: ModelConfig, weights: Weights, norm: FoldedNorm) -> None:
        """weights: the layer's `linear_attn` tensors by their short names. norm: what `forward`'s x went through."""
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.group = self.value_heads // self.key_heads
        self.widths = [config.conv_dim, config.value_dim, 2 * self.value_heads]
        self.qkv_widths = [2 * config.key_dim, config.value_dim]
        parts = [weights[f"in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")]
        self.in_proj = norm.fold(parts)  # [H, conv + value + 2·value heads]
        self.taps = weights["conv1d.weight"].squeeze(1).t().contiguous()  # [W, conv], oldest input first
        self.negative_rate = -weights["A_log"].exp().view(-1, 1, 1, 1)
        self.dt_bias = weights["dt_bias"].view(-1, 1, 1, 1)
        # The output norm: its weight, the same for every head, goes into out_proj. Queries are not scaled by Dk^-0.5;
        # the norm takes that out again, but for eps, which is scaled instead.
        device = self.taps.device
        norm_scale = (weights["norm.weight"] * self.value_dim**0.5).repeat(self.value_heads)
        self.out_proj = (weights["out_proj.weight"] * norm_scale).t().contiguous()  # [value, H]
        self.out_eps = root_eps(self.value_dim * self.key_dim, config.rms_norm_eps, device)
        self.l2_eps = root_eps(1, L2_EPS, device)

    def forward(self, x: torch.Tensor, state: DeltaNetState) -> torch.Tensor:
        """x [R, H] → gated output [R, value], before out_proj; the rows are left pending in `state`."""
        rows = x.shape[0]
        mixed, z, ba = torch.split_with_sizes(x @ self.in_proj, self.widths, -1)
        window = torch.cat([state.window, mixed])  # [W − 1 + R, conv]
        qk, v = self._heads(self._convolve(window))  # [value heads, 2, R, Dk], [value heads, R, Dv]
        b, a = ba.t()[:, None, :, None].chunk(2)  # [value heads, 1, R, 1]
        beta = b.squeeze(1).sigmoid()
        g = F.softplus(a + self.dt_bias).mul_(self.negative_rate)
        if rows <= CHUNK:
            output, update = delta_rule(qk, v, g, beta, state.recurrent)
            state.pending = PendingRows(0, window, update)
        else:
            output = self._chunks(qk, v, g, beta, window, state)
        return unit(output.transpose(0, 1), self.out_eps).reshape(rows, -1).mul_(F.silu(z))

    def _chunks(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        window: torch.Tensor,
        state: DeltaNetState,
    ) -> torch.Tensor:
        """The delta rule chunk by chunk, each committed before the next: → [value heads, R, Dv]."""
        outputs = []
        for first in range(0, v.shape[1], CHUNK):
            if first:
                state.commit(first)
            rows = slice(first, first + CHUNK)
            chunk = qk[:, :, rows].contiguous(), v[:, rows], g[:, :, rows], beta[:, rows]
            output, update = delta_rule(*chunk, state.recurrent)
            state.pending = PendingRows(first, window, update)
            outputs.append(output)
        return torch.cat(outputs, 1)

    def _convolve(self, window: torch.Tensor) -> torch.Tensor:
        """Depthwise causal convolution and silu: [W − 1 + R, conv] → [R, conv]."""
        inputs = window.unfold(0, self.taps.shape[0], 1).transpose(1, 2)  # [R, W, conv], a view
        return F.silu((inputs * self.taps).sum(1), inplace=True)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, conv] → unit queries and keys, repeated to the value heads, and values."""
        rows = qkv.shape[0]
        qk, v = torch.split_with_sizes(qkv, self.qkv_widths, -1)
        qk = unit(qk.view(rows, 2, self.key_heads, self.key_dim), self.l2_eps).permute(2, 1, 0, 3)
        qk = qk.unsqueeze(1).expand(-1, self.group, -1, -1, -1)  # [key heads, group, 2, R, Dk]
        qk = qk.reshape(self.value_heads, 2, rows, self.key_dim).contiguous()
        return qk, v.view(rows, self.value_heads, self.value_dim).transpose(0, 1)
