"""Gated full attention with partial RoPE over a key/value cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .cache import KeyValueCache
from .config import ModelConfig
from .norm import RmsNorm

Weights = Mapping[str, torch.Tensor]


class Rope:
    """Half-rotation tables for the first `rotary_dim` dimensions of a head, built in fp32 (MODEL section 1)."""

    def __init__(self, config: ModelConfig, max_context: int, dtype: torch.dtype, device: str) -> None:
        exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device) / config.rotary_dim
        angle = torch.outer(torch.arange(max_context, device=device).float(), 1.0 / config.rope_theta**exponent)
        cos, sin = angle.cos(), angle.sin()
        self.cos = torch.cat([cos, cos], -1).to(dtype)[:, None]  # [T, 1, rotary]
        self.sin = torch.cat([-sin, sin], -1).to(dtype)[:, None]  # signed, so that a roll by half does the rotation

    def rotate_(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Rotate x [R, heads, D] in place for positions start … start + R − 1."""
        rotary = self.cos.shape[-1]
        end = start + x.shape[0]
        turned = x[..., :rotary]
        half_swapped = turned.roll(rotary // 2, -1)
        turned.mul_(self.cos[start:end]).addcmul_(half_swapped, self.sin[start:end])
        return x


class GatedAttention:
    """q ‖ k ‖ v ‖ gate in one projection; query head h reads kv head h // (heads / kv heads)."""

    def __init__(self, config: ModelConfig, weights: Weights, rope: Rope) -> None:
        """weights: the layer's `self_attn` tensors by their short names."""
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.group = self.heads // self.kv_heads
        hidden = config.hidden_size
        query, gate = weights["q_proj.weight"].view(self.heads, 2, self.dim, hidden).unbind(1)
        parts = [query, weights["k_proj.weight"], weights["v_proj.weight"], gate]
        self.in_proj = (
            torch.cat([part.reshape(-1, hidden) for part in parts]).t().contiguous()  # [H, q ‖ k ‖ v ‖ gate]
        )  # [H, (2·heads + 2·kv heads)·D]
        self.out_proj = weights["o_proj.weight"].t().contiguous()  # [heads·D, H]
        query_scale = (1.0 + weights["q_norm.weight"].float()) * self.dim**-0.5  # the softmax scale rides along
        key_scale = 1.0 + weights["k_norm.weight"].float()
        scale = [query_scale.expand(self.heads, -1), key_scale.expand(self.kv_heads, -1)]
        self.qk_norm = RmsNorm(torch.cat(scale), config.rms_norm_eps)
        self.rope = rope

    def forward(self, x: torch.Tensor, cache: KeyValueCache, start: int) -> torch.Tensor:
        """x [R, H] at positions start … start + R − 1 → gated output [R, heads·D], before out_proj."""
        rows, end = x.shape[0], start + x.shape[0]
        normed_width, kv_width = (self.heads + self.kv_heads) * self.dim, self.kv_heads * self.dim
        qk, value, gate = torch.split(x @ self.in_proj, [normed_width, kv_width, self.heads * self.dim], -1)
        qk = self.rope.rotate_(self.qk_norm(qk.view(rows, -1, self.dim)), start)
        cache.keys[:, start:end] = qk[:, self.heads :].transpose(0, 1)
        cache.values[:, start:end] = value.view(rows, self.kv_heads, self.dim).transpose(0, 1)

        # the query heads of one kv head are packed into its rows: [kv heads, group·R, D]
        query = qk[:, : self.heads].view(rows, self.kv_heads, self.group, self.dim).permute(1, 2, 0, 3)
        query = query.reshape(self.kv_heads, self.group * rows, self.dim)
        scores = torch.bmm(query, cache.keys[:, :end].mT)  # [kv heads, group·R, end]
        if rows > 1:
            scores.view(self.kv_heads, self.group, rows, end)[..., start:].add_(_causal_bias(rows, x))
        mixed = torch.bmm(scores.softmax(-1), cache.values[:, :end])  # [kv heads, group·R, D]
        mixed = mixed.view(self.kv_heads, self.group, rows, self.dim).permute(2, 0, 1, 3)
        return mixed.reshape(rows, -1) * gate.sigmoid()


_biases: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}


def _causal_bias(rows: int, like: torch.Tensor) -> torch.Tensor:
    """[R, R]: 0 on and below the diagonal, −inf above; made once a row count."""
    key = (rows, like.dtype, like.device)
    if key not in _biases:
        _biases[key] = torch.full((rows, rows), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)
    return _biases[key]
