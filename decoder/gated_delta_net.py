"""Gated DeltaNet: a short causal convolution, then a linear-attention state updated by the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from .cache import DeltaNetState, PendingRows
from .config import ModelConfig
from .norm import RmsNorm, scaled_unit

Weights = Mapping[str, torch.Tensor]

CHUNK = 64  # rows solved together in prefill
L2_EPS = 1e-6


def delta_rule(
    qk: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of the gated delta rule, all rows at once (the WY form of Gated DeltaNet, arXiv 2412.06464).

    qk: [heads, 2, C, Dk], scaled queries and unit keys. v: [heads, C, Dv]. log_decay: [heads, C, 1], the running sum G
    of g inside the chunk. beta: [heads, C, 1]. state: S before the chunk, [heads, Dk, Dv], not changed.

    Row by row, Δ_i = β_i (v_i − S_{i−1}ᵀ k_i e^{g_i}) and S_i = S_{i−1} e^{g_i} + k_i Δ_iᵀ. Over the whole chunk that is
    a unit lower triangular system (I + A) Δ = β (V − e^G K S) with A_ij = β_i e^{G_i − G_j} k_i·k_j for j < i.
    Returns (output [heads, C, Dv], Δ [heads, C, Dv]).
    """
    heads, _, rows, key_dim = qk.shape
    stacked = qk.view(heads, 2 * rows, key_dim)
    decay = (log_decay - log_decay.mT).exp_().tril_().unsqueeze(1)  # [heads, 1, C, C], e^{G_i − G_j} for j ≤ i
    products = torch.bmm(stacked, qk[:, 1].mT).view(heads, 2, rows, rows) * decay
    reads = torch.bmm(stacked, state).view(heads, 2, rows, -1) * log_decay.exp().unsqueeze(1)
    system = products[:, 1] * beta  # its diagonal is not read
    deltas = torch.linalg.solve_triangular(system, (v - reads[:, 1]) * beta, upper=False, unitriangular=True)
    return torch.baddbmm(reads[:, 0], products[:, 0], deltas), deltas


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
        self.negative_rate = -weights["A_log"].float().exp()
        self.dt_bias = weights["dt_bias"].float()
        self.norm = RmsNorm(weights["norm.weight"].float(), config.rms_norm_eps)
        device = self.taps.device
        self.qk_scale = torch.tensor([self.key_dim**-0.5, 1.0], device=device).view(2, 1, 1)  # queries, keys
        self.l2_eps = torch.tensor(L2_EPS, device=device)

    def forward(self, x: torch.Tensor, state: DeltaNetState) -> torch.Tensor:
        """x [R, H] → gated output [R, value], before out_proj; the rows are left pending in `state`."""
        rows = x.shape[0]
        mixed, z, b, a = torch.split(x @ self.in_proj, self.widths, -1)
        window = torch.cat([state.window, mixed])  # [W − 1 + R, conv]
        qkv = self._convolve(window, rows)
        qk, v = self._heads(qkv, rows)  # [value heads, 2, R, Dk], [value heads, R, Dv]
        beta = b.float().sigmoid().t().unsqueeze(-1)  # [value heads, R, 1]
        g = (F.softplus(a.float() + self.dt_bias) * self.negative_rate).t().unsqueeze(-1)

        outputs = []
        for first in range(0, rows, CHUNK):
            if first:
                state.commit(first)
            chunk = slice(first, first + CHUNK)
            log_decay = g[:, chunk].cumsum(1)
            keys_queries = qk[:, :, chunk].contiguous()
            output, deltas = delta_rule(keys_queries, v[:, chunk], log_decay, beta[:, chunk], state.recurrent)
            state.pending = PendingRows(first, window, keys_queries[:, 1], deltas, log_decay)
            outputs.append(output)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return self._gated(output, z, x.dtype)

    def _convolve(self, window: torch.Tensor, rows: int) -> torch.Tensor:
        """Depthwise causal convolution and silu: [W − 1 + R, conv] → [R, conv]."""
        out = window[:rows] * self.taps[0]
        for offset in range(1, self.taps.shape[0]):
            out.addcmul_(window[offset : offset + rows], self.taps[offset])
        return F.silu(out, inplace=True)

    def _heads(self, qkv: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, conv] → normalised q, k repeated to the value heads, and v, all in fp32."""
        group = self.value_heads // self.key_heads
        qk = qkv[:, : self.qk_width].float().view(rows, 2, self.key_heads, self.key_dim)
        qk = scaled_unit(qk, self.qk_scale, self.l2_eps).permute(2, 1, 0, 3)  # [key heads, 2, R, Dk]
        qk = qk.unsqueeze(1).expand(-1, group, -1, -1, -1).reshape(self.value_heads, 2, rows, self.key_dim)
        v = qkv[:, self.qk_width :].float().view(rows, self.value_heads, self.value_dim).transpose(0, 1)
        return qk, v

    def _gated(self, output: torch.Tensor, z: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Gated norm over each head: w·norm(output)·silu(z), [heads, R, Dv] → [R, value]."""
        normed = self.norm(output.transpose(0, 1)).reshape(z.shape)
        return (normed * F.silu(z.float())).to(dtype)
