"""Prefill: the prompt in pieces through dense matrix products on weights unpacked one matrix at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from .cancellation import raise_if_cancelled
from .config import ModelConfig
from .cuda_state import ACTIVATION, AttentionCache, SequenceState
from .cuda_weights import AttentionMixer, CudaWeights, GdnMixer, LayerWeights
from .kernels.gdn_prefill import gdn_prefill
from .kernels.gdn_prepare import GdnCache
from .kernels.launch import RING
from .kernels.norm import rms_norm
from .kernels.packing import PackedLinear
from .kernels.prefill import gated_norm, swiglu_into, unpack_into
from .kernels.rope_qk import rope_qk

PIECE_ROWS = 8192  # prompt tokens read in one pass; every weight is unpacked once a pass


class Prefill:
    """Fills a SequenceState from a prompt."""

    def __init__(
        self,
        config: ModelConfig,
        weights: CudaWeights,
        state: SequenceState,
        *,
        dtype: torch.dtype = torch.bfloat16,
        piece_rows: int = PIECE_ROWS,
    ) -> None:
        """dtype: of the dense products; the residual stream is fp32."""
        self.config = config
        self.weights = weights
        self.state = state
        self.dtype = dtype
        self.piece_rows = piece_rows
        device = weights.embedding.device
        self._cudnn = (
            device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0) and piece_rows >= 1024
        )
        largest = max(packed.n * packed.k for packed in weights.linears() if packed.n != config.vocab_size)
        self._dense = torch.empty(largest, dtype=dtype, device=weights.embedding.device)

    def run(self, prompt_ids: Sequence[int]) -> torch.Tensor:
        """Read the prompt into a reset state → the last hidden state after the final norm, fp16 [1, D].

        The last position is left to the MTP head's next pass, which knows the token after it.
        """
        prompt = torch.tensor(prompt_ids, dtype=torch.int64, device=self.weights.embedding.device)
        length = len(prompt)
        for start in range(0, length, self.piece_rows):
            raise_if_cancelled()
            piece = prompt[start : start + self.piece_rows]
            self.state.set_positions(start, start, start)
            hidden = self._target(piece, start)
            following = prompt[start + 1 : start + 1 + len(piece)]
            if self.weights.mtp is not None and len(following):
                self._mtp(following, hidden[: len(following)], start)
        last = hidden[-1:].to(ACTIVATION)
        self.state.hidden[(length - 1) % RING.value] = last[0]
        self.state.set_positions(length, length, length - 1)
        return last

    def _target(self, token_ids: torch.Tensor, start: int) -> torch.Tensor:
        residual = self.weights.embedding[token_ids].float()
        for layer, cache in zip(self.weights.layers, self.state.layers, strict=True):
            normed = self._normed(residual, layer.in_norm)
            if isinstance(layer.mixer, GdnMixer):
                assert isinstance(cache, GdnCache)
                mixed = self._gated_delta_net(normed, layer.mixer, cache, start)
            else:
                assert isinstance(cache, AttentionCache)
                mixed = self._attention(normed, layer.mixer, cache, start)
            residual += self._product(mixed, layer.mixer.out)
            self._mlp(residual, layer)
        return self._normed(residual, self.weights.norm)

    def _mtp(self, following: torch.Tensor, hidden: torch.Tensor, start: int) -> None:
        """Keys and values of the MTP layer; its output is only ever needed at the newest position."""
        mtp, cache = self.weights.mtp, self.state.mtp
        assert mtp is not None
        assert cache is not None
        assert isinstance(mtp.layer.mixer, AttentionMixer)
        embedded = self._normed(self.weights.embedding[following].float(), mtp.norm_embedding)
        pair = torch.cat([embedded, self._normed(hidden, mtp.norm_hidden)], dim=-1)
        residual = self._product(pair, mtp.fc).float()
        self._project(self._normed(residual, mtp.layer.in_norm), mtp.layer.mixer, cache)

    def _mlp(self, residual: torch.Tensor, layer: LayerWeights) -> None:
        gate_up = self._product(self._normed(residual, layer.mlp_norm), layer.gate_up)
        inner = swiglu_into(gate_up, gate_up.new_empty(len(gate_up), self.config.intermediate_size))
        residual += self._product(inner, layer.down)

    def _gated_delta_net(self, normed: torch.Tensor, mixer: GdnMixer, cache: GdnCache, start: int) -> torch.Tensor:
        small, channels = mixer.small, self.config.conv_dim
        rows = self._product(normed, mixer.qkvz)
        b, a = (F.linear(normed, weight.to(normed.dtype)).float() for weight in (small.w_b, small.w_a))
        g = -small.a_log.exp() * F.softplus(a + small.dt_bias)
        o = gdn_prefill(rows, cache.raw, small.conv, g, b.sigmoid(), cache.state, start)
        kept = torch.arange(max(0, len(rows) - RING.value), len(rows), device=rows.device)
        cache.raw[(start + kept) % RING.value] = rows[kept, :channels].to(ACTIVATION)
        return gated_norm(o, rows[:, channels:], small.norm, self.config.rms_norm_eps)

    def _attention(
        self, normed: torch.Tensor, mixer: AttentionMixer, cache: AttentionCache, start: int
    ) -> torch.Tensor:
        query, gate = self._project(normed, mixer, cache)
        end = start + len(normed)
        heads_first = query.transpose(0, 1)[None]  # [1, heads, T, head dim]
        mixed = self._attend(heads_first, cache.keys[None, :, :end], cache.values[None, :, :end], start)
        mixed = mixed[0].transpose(0, 1).to(self.dtype)  # [T, heads, head dim]
        return (mixed * gate.sigmoid()).flatten(1)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
        """Causal attention of the rows from `start` on, [1, heads, T, D], over keys and values [1, kv heads, ·, D].

        Whole pieces go through cuDNN on sm_90 (2.2 times as fast there as flash): it only masks squares, so past and
        piece are attended apart. Others do not: it plans every new shape anew, for tens of milliseconds.
        """
        rows = query.shape[2]
        if self._cudnn and rows == self.piece_rows:
            inside = _cudnn_attention(query, keys[:, :, start:], values[:, :, start:], causal=True)
            if not start:
                return inside[0]
            return _merged(inside, _cudnn_attention(query, keys[:, :, :start], values[:, :, :start], causal=False))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            mask = causal_lower_right(rows, start + rows) if start else None
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=not start, enable_gqa=True
            )

    def _project(
        self, normed: torch.Tensor, mixer: AttentionMixer, cache: AttentionCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries fp16 and gates [T, heads, head dim]; keys and values go into the cache."""
        config = self.config
        heads, dim = config.num_attention_heads, config.head_dim
        rows = self._product(normed, mixer.qkv)
        query = torch.empty(len(rows), heads, dim, dtype=ACTIVATION, device=rows.device)
        rope_qk(
            rows,
            mixer.norm_q,
            mixer.norm_k,
            config.rms_norm_eps,
            self.state.rope,
            self.state.positions,
            query,
            cache.keys,
            cache.values,
        )
        return query, rows[:, : 2 * heads * dim].view(-1, heads, 2, dim)[:, :, 1]

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        rms_norm(x, weight, self.config.rms_norm_eps, out)
        return out

    def _product(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return F.linear(x, unpack_into(packed, self._dense))


def _cudnn_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [1, heads, T, head dim], log of the softmax's sum [1, heads, T, 1])."""
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(query, keys, values, None, True, 0.0, causal)
    return result[0], result[1].view(*result[0].shape[:3], 1)


def _merged(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Attention over two disjoint sets of keys from the attention over each."""
    total = torch.logaddexp(one[1], other[1])
    return one[0] * (one[1] - total).exp() + other[0] * (other[1] - total).exp()
