"""The MTP head as MODEL section 1 defines it, one position at a time in plain PyTorch, without a cache.

transformers ignores `mtp.*`, so this stands in for it; it shares no code with the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class MtpReference:
    """Drafts by the recursive definition, over the whole sequence each time."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in weights.items()}

    def drafts(self, token_ids: Sequence[int], hidden: torch.Tensor, num_drafts: int) -> list[int]:
        """token_ids: x_0 … x_n, the last one not read by the target yet. hidden: h_0 … h_{n−1} [n, H].

        The head at position p reads (embedding of x_{p+1}, h_p). Its output at n − 1 gives the first draft; then, at
        position n, the first draft's embedding and that output give the second, and so on.
        """
        following = list(token_ids[1:])
        states = list(hidden.double())
        assert len(states) == len(following)
        drafts: list[int] = []
        while len(drafts) < num_drafts:
            output = self._head(following, torch.stack(states))[-1]
            drafts.append(int((self._lm_head() @ output).argmax()))
            following.append(drafts[-1])
            states.append(output)
        return drafts

    def keys_values(self, token_ids: Sequence[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head's cache holds for true positions: [kv heads, n, D] each."""
        x = self._norm(self._input(token_ids[1:], hidden.double()), "mtp.layers.0.input_layernorm.weight")
        return self._keys(x), self._values(x)

    def _head(self, following: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        x = self._input(following, hidden)
        x = x + self._attention(self._norm(x, "mtp.layers.0.input_layernorm.weight"))
        y = self._norm(x, "mtp.layers.0.post_attention_layernorm.weight")
        gate, up = y @ self._layer("mlp.gate_proj").T, y @ self._layer("mlp.up_proj").T
        x = x + (gate / (1 + (-gate).exp()) * up) @ self._layer("mlp.down_proj").T
        return self._norm(x, "mtp.norm.weight")

    def _input(self, following: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        embedding = self.weights["model.embed_tokens.weight"][list(following)]
        embedding = self._norm(embedding, "mtp.pre_fc_norm_embedding.weight")
        hidden = self._norm(hidden, "mtp.pre_fc_norm_hidden.weight")
        return torch.cat([embedding, hidden], -1) @ self.weights["mtp.fc.weight"].T

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        heads, dim = self.config["num_attention_heads"], self.config["head_dim"]
        q_gate = (x @ self._layer("self_attn.q_proj").T).view(len(x), heads, 2 * dim)
        query = self._rope(self._norm(q_gate[..., :dim], "mtp.layers.0.self_attn.q_norm.weight").transpose(0, 1))
        keys, values = self._keys(x), self._values(x)
        group = heads // self.config["num_key_value_heads"]
        outputs = []
        for head in range(heads):
            scores = query[head] @ keys[head // group].T * dim**-0.5
            future = torch.ones_like(scores).triu(1).bool()
            outputs.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ values[head // group])
        gated = torch.stack(outputs, 1) * q_gate[..., dim:].sigmoid()
        return gated.reshape(len(x), -1) @ self._layer("self_attn.o_proj").T

    def _keys(self, x: torch.Tensor) -> torch.Tensor:
        keys = (x @ self._layer("self_attn.k_proj").T).view(len(x), -1, self.config["head_dim"])
        return self._rope(self._norm(keys, "mtp.layers.0.self_attn.k_norm.weight").transpose(0, 1))

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self._layer("self_attn.v_proj").T).view(len(x), -1, self.config["head_dim"]).transpose(0, 1)

    def _rope(self, x: torch.Tensor) -> torch.Tensor:
        """[heads, n, D]: pairs (i, i + r/2) of the first r dimensions turn by position·theta^(−2i/r)."""
        rope = self.config["rope_parameters"]
        half = int(self.config["head_dim"] * rope["partial_rotary_factor"]) // 2
        out = x.clone()
        for i in range(half):
            angle = torch.arange(x.shape[1]).double() * rope["rope_theta"] ** (-i / half)
            first, second = x[..., i], x[..., i + half]
            out[..., i] = first * angle.cos() - second * angle.sin()
            out[..., i + half] = second * angle.cos() + first * angle.sin()
        return out

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = (x * x).mean(-1, keepdim=True)
        eps: float = self.config["rms_norm_eps"]
        return x / (mean_square + eps).sqrt() * (1 + self.weights[name])

    def _layer(self, name: str) -> torch.Tensor:
        return self.weights[f"mtp.layers.0.{name}.weight"]

    def _lm_head(self) -> torch.Tensor:
        tied = self.config["tie_word_embeddings"]
        return self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
