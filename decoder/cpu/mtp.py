"""The multi-token-prediction head: one attention layer that guesses the token after the next."""

from __future__ import annotations

import torch

from ..checkpoint.config import FULL_ATTENTION, ModelConfig
from .attention import Rope
from .cache import KeyValueCache
from .model import DecoderLayer, Weights, take
from .norm import FoldedNorm, RmsNorm


class MtpHead:
    """At position p: embedding of token p + 1 and the hidden state of p → a hidden state that predicts token p + 2."""

    def __init__(self, config: ModelConfig, weights: Weights, rope: Rope) -> None:
        """weights: every `mtp.` tensor by its canonical name, in fp32."""
        self.embedding_norm = FoldedNorm(1.0 + weights["mtp.pre_fc_norm_embedding.weight"], config.rms_norm_eps)
        self.hidden_norm = FoldedNorm(1.0 + weights["mtp.pre_fc_norm_hidden.weight"], config.rms_norm_eps)
        fc_embedding, fc_hidden = weights["mtp.fc.weight"].chunk(2, 1)  # the embedding comes first
        self.fc_embedding = self.embedding_norm.fold([fc_embedding])  # [H, H]
        self.fc_hidden = self.hidden_norm.fold([fc_hidden])  # [H, H]
        self.layer = DecoderLayer(config, FULL_ATTENTION, take(weights, "mtp.layers.0."), rope)
        self.norm = RmsNorm(1.0 + weights["mtp.norm.weight"], config.rms_norm_eps)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor, cache: KeyValueCache, start: int) -> torch.Tensor:
        """embeddings [R, H] of tokens p + 1, hidden [R, H] of positions p = start … → [R, H] after `mtp.norm`."""
        x = torch.addmm(self.embedding_norm(embeddings) @ self.fc_embedding, self.hidden_norm(hidden), self.fc_hidden)
        return self.norm(self.layer.forward(x, cache, start))
