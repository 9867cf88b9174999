"""Checkpoint tensors → the structures of model.h, and the memory that they point into."""

from __future__ import annotations

import ctypes
import math

import torch

from ..checkpoint.config import FULL_ATTENTION, ModelConfig
from ..checkpoint.draft_vocabulary import DraftVocabulary
from ..cpu.attention import Rope
from .layout import LayerView, MatrixView, ModelView, as_bf16, interleave, pack, pad_last

Weights = dict[str, torch.Tensor]

TABLE_FLOATS = 16 << 20  # 64 MiB: what a small vocabulary takes


class NativeWeights:
    """A model's `view` for the C++; keeps alive what it points to."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        max_context: int,
        prefill_threads: int,
        draft_vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """weights: checkpoint tensors in fp32 by canonical name, with the `mtp.` ones if wanted; emptied here."""
        self._kept: list[torch.Tensor] = []
        self._weights = weights
        self.has_mtp = "mtp.fc.weight" in weights
        view = self.view = ModelView(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            num_layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_half=config.rotary_dim // 2,
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim,
            has_mtp=self.has_mtp,
            prefill_threads=prefill_threads,
            eps=config.rms_norm_eps,
            table_floats=TABLE_FLOATS,
        )
        self._layers = (LayerView * config.num_hidden_layers)(
            *(self._layer(config, kind, f"model.layers.{index}.") for index, kind in enumerate(config.layer_types))
        )
        view.layers = self._layers
        self._vocabulary(config, draft_vocabulary)
        view.final_norm = self._norm("model.norm.weight")
        rope = Rope(config, max_context, "cpu")
        view.cosine = self._keep(rope.cos[:, 0, : rope.half])
        view.sine = self._keep(rope.sin[:, 0, rope.half :])
        if self.has_mtp:
            self._mtp(config)

    def _vocabulary(self, config: ModelConfig, draft_vocabulary: DraftVocabulary | None) -> None:
        view, take = self.view, self._weights.pop
        embedding = take("model.embed_tokens.weight")
        head = embedding if config.tie_word_embeddings else take("lm_head.weight")
        view.head = view.draft_head = self._matrix(head)
        if draft_vocabulary is not None:
            draft_ids = draft_vocabulary.rows(1, config.vocab_size)
            view.draft_ids, view.draft_head = self._keep(draft_ids), self._matrix(head[draft_ids])
        narrow = as_bf16(embedding)
        view.embedding_is_bf16 = narrow is not None
        view.embedding = self._keep(embedding if narrow is None else narrow)

    def _mtp(self, config: ModelConfig) -> None:
        fc_embedding, fc_hidden = self._weights.pop("mtp.fc.weight").chunk(2, 1)  # the embedding comes first
        self.view.fc_embedding, self.view.fc_hidden = self._matrix(fc_embedding), self._matrix(fc_hidden)
        self.view.embedding_norm = self._norm("mtp.pre_fc_norm_embedding.weight")
        self.view.hidden_norm = self._norm("mtp.pre_fc_norm_hidden.weight")
        self.view.mtp_norm = self._norm("mtp.norm.weight")
        self._mtp_layer = self._layer(config, FULL_ATTENTION, "mtp.layers.0.")
        self.view.mtp_layer = ctypes.pointer(self._mtp_layer)

    def _layer(self, config: ModelConfig, kind: str, prefix: str) -> LayerView:
        take = self._weights.pop
        layer = LayerView(is_attention=kind == FULL_ATTENTION)
        layer.mixer_norm = self._norm(prefix + "input_layernorm.weight")
        layer.mlp_norm = self._norm(prefix + "post_attention_layernorm.weight")
        gate, up = take(prefix + "mlp.gate_proj.weight"), take(prefix + "mlp.up_proj.weight")
        layer.gate_up = self._matrix(interleave(gate, up))
        layer.down = self._matrix(take(prefix + "mlp.down_proj.weight"))
        if kind == FULL_ATTENTION:
            self._attention(config, layer, prefix + "self_attn.")
        else:
            self._delta_net(config, layer, prefix + "linear_attn.")
        return layer

    def _attention(self, config: ModelConfig, layer: LayerView, prefix: str) -> None:
        take = self._weights.pop
        heads, dim, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
        query, gate = take(prefix + "q_proj.weight").view(heads, 2, dim, hidden).unbind(1)
        layer.in_proj = self._matrix(torch.cat([query.reshape(-1, hidden), gate.reshape(-1, hidden)]))
        layer.kv_proj = self._matrix(torch.cat([take(prefix + "k_proj.weight"), take(prefix + "v_proj.weight")]))
        layer.out_proj = self._matrix(take(prefix + "o_proj.weight"))
        softmax_scale = dim**-0.5 * math.log2(math.e)  # the softmax is one of powers of two
        layer.q_norm = self._keep((1.0 + take(prefix + "q_norm.weight")) * softmax_scale)
        layer.k_norm = self._norm(prefix + "k_norm.weight")

    def _delta_net(self, config: ModelConfig, layer: LayerView, prefix: str) -> None:
        take = self._weights.pop
        parts = [take(f"{prefix}in_proj_{part}.weight") for part in ("qkv", "z", "b", "a")]
        layer.in_proj = self._matrix(torch.cat(parts))
        layer.out_proj = self._matrix(take(prefix + "out_proj.weight"))
        layer.taps = self._keep(pad_last(take(prefix + "conv1d.weight").squeeze(1).t()))
        layer.negative_rate = self._keep(-take(prefix + "A_log").exp())
        layer.dt_bias = self._keep(take(prefix + "dt_bias"))
        layer.out_norm = self._keep(take(prefix + "norm.weight"))

    def _matrix(self, weight: torch.Tensor) -> MatrixView:
        packed, is_bf16 = pack(weight)
        self._kept.append(packed)
        return MatrixView(packed.data_ptr(), weight.shape[0], weight.shape[1], is_bf16)

    def _norm(self, name: str) -> int:
        """Address of 1 + w."""
        return self._keep(1.0 + self._weights.pop(name))

    def _keep(self, values: torch.Tensor) -> int:
        """Address of a contiguous copy."""
        kept = values.contiguous()
        self._kept.append(kept)
        return kept.data_ptr()
