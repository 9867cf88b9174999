"""The multi-token-prediction head: one attention layer that guesses the token after the next."""

from __future__ import annotations

import torch

from .attention import Rope
from .cache import KeyValueCache
from .config import FULL_ATTENTION, ModelConfig
from .model import DecoderLayer, Weights, offset_norm, take


class MtpHead:
    """At position p: embedding of token p + 1 and the hidden state of p → a hidden state that predicts token p + 2."""

    def __init__(self, config: ModelConfig, weights: Weights, rope: Rope) -> None:
        """weights: every `mtp.` tensor by its canonical name, in fp32."""
        self.embedding_norm = offset_norm(weights["mtp.pre_fc_norm_embedding.weight"], config)
        self.hidden_norm = offset_norm(weights["mtp.pre_fc_norm_hidden.weight"], config)
        self.fc = weights["mtp.fc.weight"].t().contiguous()  # [2·H, H]
        self.layer = DecoderLayer(config, FULL_ATTENTION, take(weights, "mtp.layers.0."), rope)
        self.norm = offset_norm(weights["mtp.norm.weight"], config)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor, cache: KeyValueCache, start: int) -> torch.Tensor:
        """embeddings [R, H] of tokens p + 1, hidden [R, H] of positions p = start … → [R, H] after `mtp.norm`."""
        x = torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden)], -1) @ self.fc
        return self.norm(self.layer.forward(x, cache, start))
