"""Gated full attention with partial RoPE over a key/value cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .cache import KeyValueCache
from .config import ModelConfig
from .norm import RmsNorm

Weights = Mapping[str, torch.Tensor]


BLOCK = 64  # query rows attended together, so that their scores stay in the cache


class Rope:
    """Half-rotation tables for the first `rotary_dim` dimensions of a head (MODEL section 1)."""

    def __init__(self, config: ModelConfig, max_context: int, device: str) -> None:
        exponent = torch.arange(0, config.rotary_dim, 2, device=device).float() / config.rotary_dim
        angle = torch.outer(torch.arange(max_context, device=device).float(), 1.0 / config.rope_theta**exponent)
        cos, sin = angle.cos(), angle.sin()
        self.half = config.rotary_dim // 2
        self.cos = torch.cat([cos, cos], -1)[:, None]  # [T, 1, rotary]
        self.sin = torch.cat([-sin, sin], -1)[:, None]  # signed, so that swapping the halves does the rotation

    def rotate_(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Rotate x [R, heads, D] in place for positions start … start + R − 1."""
        end = start + x.shape[0]
        turned = x[..., : 2 * self.half]
        swapped = turned.roll(self.half, -1)
        turned.mul_(self.cos[start:end]).addcmul_(swapped, self.sin[start:end])
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
        self.widths = [(self.heads + self.kv_heads) * self.dim, self.kv_heads * self.dim, self.heads * self.dim]
        query_scale = (1.0 + weights["q_norm.weight"]) * self.dim**-0.5  # the softmax scale rides along
        key_scale = 1.0 + weights["k_norm.weight"]
        scale = [query_scale.expand(self.heads, -1), key_scale.expand(self.kv_heads, -1)]
        self.qk_norm = RmsNorm(torch.cat(scale), config.rms_norm_eps)
        self.rope = rope
        self.future = torch.full((BLOCK, BLOCK), float("-inf"), device=self.in_proj.device).triu_(1)

    def forward(self, x: torch.Tensor, cache: KeyValueCache, start: int) -> torch.Tensor:
        """x [R, H] at positions start … start + R − 1 → gated output [R, heads·D], before out_proj."""
        rows = x.shape[0]
        qk, value, gate = torch.split(x @ self.in_proj, self.widths, -1)
        qk = self.rope.rotate_(self.qk_norm(qk.view(rows, -1, self.dim)), start)
        cache.write(start, qk[:, self.heads :], value.view(rows, self.kv_heads, self.dim))
        # the query heads of one kv head become rows of one product: [kv heads, group, R, D]
        query = qk[:, : self.heads].view(rows, self.kv_heads, self.group, self.dim).permute(1, 2, 0, 3)
        blocks = [self._attend(query[:, :, i : i + BLOCK], cache, start + i) for i in range(0, rows, BLOCK)]
        mixed = blocks[0] if rows <= BLOCK else torch.cat(blocks)
        return mixed.mul_(gate.sigmoid())

    def _attend(self, query: torch.Tensor, cache: KeyValueCache, start: int) -> torch.Tensor:
        """Causal attention of [kv heads, group, r, D] at positions start … → [r, heads·D]."""
        rows = query.shape[2]
        end = start + rows
        scores = torch.bmm(query.reshape(self.kv_heads, -1, self.dim), cache.keys_t[:, :, :end])
        if rows > 1:
            scores.view(self.kv_heads, self.group, rows, end)[..., start:].add_(self.future[:rows, :rows])
        mixed = torch.bmm(scores.softmax(-1), cache.values[:, :end])  # [kv heads, group·r, D]
        return mixed.view(self.kv_heads, self.group, rows, self.dim).permute(2, 0, 1, 3).reshape(rows, -1)
