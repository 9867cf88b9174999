"""Gated DeltaNet: a short causal convolution, then a linear-attention state updated by the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from .cache import DeltaNetState, DeltaUpdate, PendingRows
from .config import ModelConfig
from .norm import RmsNorm, scaled_unit

Weights = Mapping[str, torch.Tensor]

CHUNK = 64  # rows solved together in prefill
L2_EPS = 1e-6


def delta_rule(
    qk: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, DeltaUpdate]:
    """One chunk of the gated delta rule, all rows at once (the WY form of Gated DeltaNet, arXiv 2412.06464).

    qk: [heads, 2, C, Dk], scaled queries and unit keys. v: [heads, C, Dv]. g, beta: [heads, C, 1]. state: S before the
    chunk, [heads, Dk, Dv], left as it is. Returns (output [heads, C, Dv], what the rows would do to S).

    Row by row, Δ_i = β_i (v_i − S_{i−1}ᵀ k_i e^{g_i}) and S_i = S_{i−1} e^{g_i} + k_i Δ_iᵀ. With G the running sum of g
    that is a unit lower triangular system (I + A) Δ = β (V − e^G K S) where A_ij = β_i e^{G_i − G_j} k_i·k_j for j < i.
    """
    heads, _, rows, key_dim = qk.shape
    stacked = qk.view(heads, 2 * rows, key_dim)
    total = g.cumsum(1)
    decay = (total - total.mT).exp_().tril_()  # [heads, C, C], e^{G_i − G_j} for j ≤ i
    from_start = total.exp_()  # [heads, C, 1]
    products = torch.bmm(stacked, qk[:, 1].mT).view(heads, 2, rows, rows).mul_(decay[:, None])
    reads = torch.bmm(stacked, state).view(heads, 2, rows, -1).mul_(from_start[:, None])
    system = products[:, 1] * beta  # its diagonal is not read
    deltas = torch.linalg.solve_triangular(system, (v - reads[:, 1]).mul_(beta), upper=False, unitriangular=True)
    output = torch.baddbmm(reads[:, 0], products[:, 0], deltas)
    return output, DeltaUpdate(qk[:, 1], deltas, decay, from_start)


class GatedDeltaNet:
    """qkv ‖ z ‖ b ‖ a in one projection; value head h reads key head h // (value heads / key heads)."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """weights: the layer's `linear_attn` tensors by their short names."""
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.widths = [config.conv_dim, config.value_dim, self.value_heads, self.value_heads]
        self.qk_width = 2 * config.key_dim
        parts = [weights[f"in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")]
        self.in_proj = torch.cat(parts).t().contiguous()  # [H, conv + value + 2·value heads]
        self.out_proj = weights["out_proj.weight"].t().contiguous()  # [value, H]
        self.taps = weights["conv1d.weight"].squeeze(1).t().contiguous()  # [W, conv], oldest input first
        self.negative_rate = -weights["A_log"].exp()
        self.dt_bias = weights["dt_bias"]
        self.norm = RmsNorm(weights["norm.weight"], config.rms_norm_eps)
        device = self.taps.device
        self.qk_scale = torch.tensor([self.key_dim**-0.5, 1.0], device=device).view(2, 1, 1)  # queries, keys
        self.l2_eps = torch.tensor(L2_EPS, device=device)

    def forward(self, x: torch.Tensor, state: DeltaNetState) -> torch.Tensor:
        """x [R, H] → gated output [R, value], before out_proj; the rows are left pending in `state`."""
        rows = x.shape[0]
        mixed, z, b, a = torch.split(x @ self.in_proj, self.widths, -1)
        window = torch.cat([state.window, mixed])  # [W − 1 + R, conv]
        qk, v = self._heads(self._convolve(window))  # [value heads, 2, R, Dk], [value heads, R, Dv]
        beta = b.sigmoid().t()[..., None]  # [value heads, R, 1]
        g = F.softplus(a + self.dt_bias).mul_(self.negative_rate).t()[..., None]

        outputs = []
        for first in range(0, rows, CHUNK):
            if first:
                state.commit(first)
            chunk = slice(first, first + CHUNK)
            output, update = delta_rule(
                qk[:, :, chunk].contiguous(), v[:, chunk], g[:, chunk], beta[:, chunk], state.recurrent
            )
            state.pending = PendingRows(first, window, update)
            outputs.append(output)
        output = outputs[0] if rows <= CHUNK else torch.cat(outputs, 1)
        return self.norm(output.transpose(0, 1)).reshape(rows, -1).mul_(F.silu(z))

    def _convolve(self, window: torch.Tensor) -> torch.Tensor:
        """Depthwise causal convolution and silu: [W − 1 + R, conv] → [R, conv]."""
        taps = self.taps.shape[0]
        inputs = window.unfold(0, taps, 1).transpose(1, 2)  # [R, W, conv], a view
        return F.silu((inputs * self.taps).sum(1), inplace=True)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, conv] → normalised q and k, repeated to the value heads, and v."""
        rows, group = qkv.shape[0], self.value_heads // self.key_heads
        qk = qkv[:, : self.qk_width].view(rows, 2, self.key_heads, self.key_dim)
        qk = scaled_unit(qk, self.qk_scale, self.l2_eps).permute(2, 1, 0, 3)  # [key heads, 2, R, Dk]
        qk = qk[:, None].expand(-1, group, -1, -1, -1).reshape(self.value_heads, 2, rows, self.key_dim)
        return qk, qkv[:, self.qk_width :].view(rows, self.value_heads, self.value_dim).transpose(0, 1)
