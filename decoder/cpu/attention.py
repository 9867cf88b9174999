"""Gated full attention with partial RoPE over a key/value cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..checkpoint.config import ModelConfig
from .cache import KeyValueCache
from .norm import FoldedNorm, RmsNorm

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
        rows = x.shape[0]
        turned = x.narrow(-1, 0, 2 * self.half)
        swapped = turned.roll(self.half, -1)
        turned.mul_(self.cos.narrow(0, start, rows)).addcmul_(swapped, self.sin.narrow(0, start, rows))
        return x


class GatedAttention:
    """q ‖ k ‖ v ‖ gate in one projection; query head h reads kv head h // (heads / kv heads)."""

    def __init__(self, config: ModelConfig, weights: Weights, norm: FoldedNorm, rope: Rope) -> None:
        """weights: the layer's `self_attn` tensors by their short names. norm: what `forward`'s x went through."""
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.group = self.heads // self.kv_heads
        self.widths = [(self.heads + self.kv_heads) * self.dim, self.kv_heads * self.dim, self.heads * self.dim]
        hidden = config.hidden_size
        query, gate = weights["q_proj.weight"].view(self.heads, 2, self.dim, hidden).unbind(1)
        parts = [query, weights["k_proj.weight"], weights["v_proj.weight"], gate]
        self.in_proj = norm.fold([part.reshape(-1, hidden) for part in parts])  # [H, q ‖ k ‖ v ‖ gate]
        self.out_proj = weights["o_proj.weight"].t().contiguous()  # [heads·D, H]
        query_scale = (1.0 + weights["q_norm.weight"]) * self.dim**-0.5  # the softmax scale rides along
        key_scale = 1.0 + weights["k_norm.weight"]
        scale = [query_scale.expand(self.heads, -1), key_scale.expand(self.kv_heads, -1)]
        self.qk_norm = RmsNorm(torch.cat(scale), config.rms_norm_eps)
        self.rope = rope
        self.future = torch.full((BLOCK, BLOCK), float("-inf"), device=self.in_proj.device).triu_(1)

    def forward(self, x: torch.Tensor, cache: KeyValueCache, start: int, skipped: int = 0) -> torch.Tensor:
        """x [R, H] at positions start … start + R − 1 → gated output [R − skipped, heads·D], before out_proj.

        Of the first `skipped` rows only keys and values are kept.
        """
        rows = x.shape[0]
        qk, value, gate = torch.split_with_sizes(x @ self.in_proj, self.widths, -1)
        qk = self.rope.rotate_(self.qk_norm(qk.view(rows, -1, self.dim)), start)
        query, key = torch.split_with_sizes(qk, [self.heads, self.kv_heads], 1)
        place = start - cache.origin
        cache.write(place, key, value.view(rows, self.kv_heads, self.dim))
        # the query heads of one kv head become rows of one product: [kv heads, group, R, D]
        query = query.view(rows, self.kv_heads, self.group, self.dim).permute(1, 2, 0, 3)[:, :, skipped:]
        first = place + skipped
        if query.shape[2] <= BLOCK:
            mixed = self._attend(query, cache, first)
        else:
            blocks = enumerate(torch.split(query, BLOCK, 2))
            mixed = torch.cat([self._attend(block, cache, first + i * BLOCK) for i, block in blocks])
        return mixed.mul_(gate[skipped:].sigmoid())

    def _attend(self, query: torch.Tensor, cache: KeyValueCache, start: int) -> torch.Tensor:
        """Causal attention of [kv heads, group, r, D] at places start … → [r, heads·D]."""
        rows = query.shape[2]
        end = start + rows
        query = query.reshape(self.kv_heads, self.group * rows, self.dim)
        scores = torch.bmm(query, cache.keys_t.narrow(2, 0, end))  # [kv heads, group·r, end]
        if rows > 1:
            latest = scores.view(self.kv_heads, self.group, rows, end).narrow(3, start, rows)
            latest.add_(self.future[:rows, :rows])
        mixed = torch.bmm(scores.softmax(-1), cache.values.narrow(1, 0, end))  # [kv heads, group·r, D]
        mixed = mixed.view(self.kv_heads, self.group, rows, self.dim).permute(2, 0, 1, 3)
        return mixed.reshape(rows, self.heads * self.dim)
