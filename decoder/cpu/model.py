"""The target model: embedding, layers of one mixer and one MLP, final norm, head."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..checkpoint.config import FULL_ATTENTION, ModelConfig
from .attention import GatedAttention, Rope
from .cache import DeltaNetState, KeyValueCache, SequenceState
from .gated_delta_net import GatedDeltaNet
from .norm import FoldedNorm, RmsNorm

Weights = dict[str, torch.Tensor]


def take(weights: Weights, prefix: str) -> Weights:
    """Move the tensors below `prefix` out of `weights`, by the rest of their names, so that fusing frees them."""
    return {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}


class DecoderLayer:
    """x + mixer(norm(x)), then x + mlp(norm(x)); both residual additions ride on the last matrix product."""

    def __init__(self, config: ModelConfig, kind: str, weights: Weights, rope: Rope) -> None:
        self.mixer_norm = FoldedNorm(1.0 + weights["input_layernorm.weight"], config.rms_norm_eps)
        self.mlp_norm = FoldedNorm(1.0 + weights["post_attention_layernorm.weight"], config.rms_norm_eps)
        self.mixer: GatedAttention | GatedDeltaNet = (
            GatedAttention(config, take(weights, "self_attn."), self.mixer_norm, rope)
            if kind == FULL_ATTENTION
            else GatedDeltaNet(config, take(weights, "linear_attn."), self.mixer_norm)
        )
        self.gate_up = self.mlp_norm.fold([weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]])  # [H, 2·I]
        self.down = weights["mlp.down_proj.weight"].t().contiguous()  # [I, H]

    def forward(
        self, x: torch.Tensor, state: KeyValueCache | DeltaNetState, start: int, skipped: int = 0
    ) -> torch.Tensor:
        """x [R, H] at positions start … start + R − 1 → [R, H]; the first `skipped` rows go without the mixer."""
        normed = self.mixer_norm(x)
        if isinstance(self.mixer, GatedAttention):
            assert isinstance(state, KeyValueCache)
            mixed = self.mixer.forward(normed, state, start, skipped)
        else:
            assert isinstance(state, DeltaNetState)
            mixed = self.mixer.forward(normed, state)[skipped:]
        served = torch.addmm(x[skipped:], mixed, self.mixer.out_proj)
        x = torch.cat([x[:skipped], served]) if skipped else served
        gate, up = (self.mlp_norm(x) @ self.gate_up).view(x.shape[0], 2, -1).unbind(1)
        return torch.addmm(x, F.silu(gate).mul_(up), self.down)


class Model:
    """Weights of the target, fused for few matrix products; the sequence lives in a SequenceState."""

    def __init__(self, config: ModelConfig, weights: Weights, rope: Rope) -> None:
        """weights: the target's tensors by canonical name, in fp32; taken out as layers are built."""
        self.embedding = weights["model.embed_tokens.weight"]  # [V, H]
        tied = config.tie_word_embeddings
        self.head = self.embedding.t() if tied else weights["lm_head.weight"].t().contiguous()  # [H, V]
        self.layers = [
            DecoderLayer(config, kind, take(weights, f"model.layers.{index}."), rope)
            for index, kind in enumerate(config.layer_types)
        ]
        self.norm = RmsNorm(1.0 + weights["model.norm.weight"], config.rms_norm_eps)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[R] → [R, H]."""
        return self.embedding.index_select(0, token_ids)

    def forward(self, token_ids: torch.Tensor, state: SequenceState, start: int, skipped: int = 0) -> torch.Tensor:
        """Token ids [R] at positions start … → hidden states after the final norm [R, H]; GDN rows are left pending.

        In the last layer the first `skipped` rows go without the mixer, but for its state.
        """
        x = self.embed(token_ids)
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x = layer.forward(x, layer_state, start, skipped if layer is self.layers[-1] else 0)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] → [R, V]."""
        return hidden @ self.head
