"""Prefill: the prompt in pieces through dense matrix products on weights unpacked one matrix at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from .cancellation import raise_if_cancelled
from .config import ModelConfig
from .cuda_state import ACTIVATION, AttentionCache, SequenceState
from .cuda_weights import AttentionMixer, CudaWeights, GdnMixer, LayerWeights
from .errors import DecoderError
from .kernels.gdn_prefill import gdn_prefill, is_right
from .kernels.gdn_prepare import GdnCache
from .kernels.launch import RING
from .kernels.norm import rms_norm
from .kernels.packing import TILE, PackedLinear
from .kernels.prefill import Part, add_norm, gated_norm, merge_and_gate, swiglu_into, unpack_into
from .kernels.prefill_fp8 import check_fp8_products, fits, fp8_linear
from .kernels.rope_qk import rope_qk

log = logging.getLogger("kernarc.decoder")
PIECE_ROWS = 16384  # prompt tokens read in one pass; every weight is unpacked once a pass
CUDNN_ROWS = (16384, 8192)  # pieces of exactly these go through cuDNN, which plans every new shape for tens of ms


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
        fp8: bool = False,
    ) -> None:
        """dtype: of the dense products; the residual stream is fp32. fp8: multiply in FP8 where the weights allow it.

        Raises DecoderError where FP8 products are asked for and the card has none.
        """
        self.config = config
        self.weights = weights
        self.state = state
        self.dtype = dtype
        self.piece_rows = piece_rows
        self.fp8 = fp8
        device = weights.embedding.device
        if fp8:
            check_fp8_products(device)
        self._cudnn = device.type == "cuda" and _has_cudnn_attention(config, device)
        self._by_blocks = device.type != "cuda" or _trusted_form(state, weights)
        self._dense = torch.empty(max(packed.n * packed.k for packed in self._linears()), dtype=dtype, device=device)

        self._mtp_mixer: AttentionMixer | None = None  # without its queries, where those can be cut off
        if weights.mtp is not None and isinstance(mixer := weights.mtp.layer.mixer, AttentionMixer):
            keys = rows_from(mixer.qkv, 2 * config.num_attention_heads * config.head_dim)
            self._mtp_mixer = None if keys is None else replace(mixer, qkv=keys)

    def _linears(self) -> Iterator[PackedLinear]:
        for layer in self.weights.layers:
            yield from layer.linears()
        if self.weights.mtp is not None:
            yield from self.weights.mtp.layer.linears()
            yield self.weights.mtp.fc

    def run(self, prompt_ids: Sequence[int]) -> torch.Tensor:
        """Read the prompt into a reset state → the last hidden state after the final norm, fp16 [1, D].

        The last position is left to the MTP head's next pass, which knows the token after it.
        """
        prompt = torch.tensor(prompt_ids, dtype=torch.int64, device=self.weights.embedding.device)
        length = len(prompt)
        for start, end in self._pieces(length):
            raise_if_cancelled()
            self.state.set_positions(start, start, start)
            hidden = self._target(prompt[start:end], start)
            following = prompt[start + 1 : end + 1]
            if self.weights.mtp is not None and len(following):
                self._mtp(following, hidden[: len(following)])
        last = hidden[-1:].to(ACTIVATION)
        self.state.hidden[(length - 1) % RING.value] = last[0]
        self.state.set_positions(length, length, length - 1)
        return last

    def _pieces(self, length: int) -> Iterator[tuple[int, int]]:
        """(start, end) of each piece: as large as allowed, then sizes that cuDNN has planned, then the rest."""
        start = 0
        while start < length:
            left = min(length - start, self.piece_rows)
            size = next((rows for rows in CUDNN_ROWS if self._cudnn and rows <= left), left)
            yield start, start + size
            start += size

    def _target(self, token_ids: torch.Tensor, start: int) -> torch.Tensor:
        layers, eps = self.weights.layers, self.config.rms_norm_eps
        stream = self.weights.embedding[token_ids].float()
        normed = self._normed(stream, layers[0].in_norm)
        next_norms = [*(layer.in_norm for layer in layers[1:]), self.weights.norm]
        for layer, cache, next_norm in zip(layers, self.state.layers, next_norms, strict=True):
            if isinstance(layer.mixer, GdnMixer):
                assert isinstance(cache, GdnCache)
                mixed = self._gated_delta_net(normed, layer.mixer, cache, start)
            else:
                assert isinstance(cache, AttentionCache)
                mixed = self._attention(normed, layer.mixer, cache, start)
            normed = add_norm(stream, self._product(mixed, layer.mixer.out), layer.mlp_norm, eps)
            normed = add_norm(stream, self._mlp(normed, layer), next_norm, eps)
        return normed

    def _mtp(self, following: torch.Tensor, hidden: torch.Tensor) -> None:
        """Keys and values of the MTP layer; its queries and its output are only ever needed at the newest position."""
        mtp, cache = self.weights.mtp, self.state.mtp
        assert mtp is not None
        assert cache is not None
        assert isinstance(mtp.layer.mixer, AttentionMixer)
        embedded = self._normed(self.weights.embedding[following].float(), mtp.norm_embedding)
        pair = torch.cat([embedded, self._normed(hidden, mtp.norm_hidden)], dim=-1)
        residual = self._product(pair, mtp.fc).float()
        self._project(self._normed(residual, mtp.layer.in_norm), self._mtp_mixer or mtp.layer.mixer, cache)

    def _mlp(self, normed: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        gate_up = self._product(normed, layer.gate_up)
        inner = swiglu_into(gate_up, gate_up.new_empty(len(gate_up), self.config.intermediate_size))
        return self._product(inner, layer.down)

    def _gated_delta_net(self, normed: torch.Tensor, mixer: GdnMixer, cache: GdnCache, start: int) -> torch.Tensor:
        small, channels = mixer.small, self.config.conv_dim
        rows = self._product(normed, mixer.qkvz)
        b, a = (F.linear(normed, weight.to(normed.dtype)).float() for weight in (small.w_b, small.w_a))
        g = -small.a_log.exp() * F.softplus(a + small.dt_bias)
        o = gdn_prefill(rows, cache.raw, small.conv, g, b.sigmoid(), cache.state, start, by_blocks=self._by_blocks)
        kept = torch.arange(max(0, len(rows) - RING.value), len(rows), device=rows.device)
        cache.raw[(start + kept) % RING.value] = rows[kept, :channels].to(ACTIVATION)
        return gated_norm(o, rows[:, channels:], small.norm, self.config.rms_norm_eps)

    def _attention(
        self, normed: torch.Tensor, mixer: AttentionMixer, cache: AttentionCache, start: int
    ) -> torch.Tensor:
        query, projected = self._project(normed, mixer, cache)
        end = start + len(normed)
        heads_first = query.transpose(0, 1)[None]  # [1, heads, T, head dim]
        inside, past = self._attend(heads_first, cache.keys[None, :, :end], cache.values[None, :, :end], start)
        return merge_and_gate(inside, past, projected)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
    ) -> tuple[Part, Part | None]:
        """Causal attention of the rows from `start` on, [1, heads, T, D], over keys and values [1, kv heads, ·, D].

        cuDNN is 2.2 times as fast as flash on sm_90, but only masks squares: past and piece are attended apart.
        """
        rows = query.shape[2]
        if self._cudnn and rows in CUDNN_ROWS:
            inside = _cudnn_attention(query, keys[:, :, start:], values[:, :, start:], causal=True)
            if not start:
                return inside, None
            return inside, _cudnn_attention(query, keys[:, :, :start], values[:, :, :start], causal=False)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            mask = causal_lower_right(rows, start + rows) if start else None
            whole = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=not start, enable_gqa=True
            )
        return (whole[0], None), None

    def _project(
        self, normed: torch.Tensor, mixer: AttentionMixer, cache: AttentionCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries fp16 [T, heads, head dim], the projection [T, …]); keys and values go into the cache.

        Of a projection without its query rows there are no queries.
        """
        config = self.config
        rows = self._product(normed, mixer.qkv)
        heads = rows.shape[1] // (2 * config.head_dim) - config.num_key_value_heads
        query = torch.empty(len(rows), heads, config.head_dim, dtype=ACTIVATION, device=rows.device)
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
        return query, rows

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        rms_norm(x, weight, self.config.rms_norm_eps, out)
        return out

    def _product(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        if self.fp8 and fits(packed):
            return fp8_linear(x, packed, self._dense.view(torch.uint8))
        return F.linear(x, unpack_into(packed, self._dense))


def rows_from(packed: PackedLinear, first: int) -> PackedLinear | None:
    """The packed rows from `first` on, sharing memory; None where they do not start a tile."""
    if first % TILE or packed.interleaved:
        return None
    tile = first // TILE
    weights = packed.weights.view(packed.tiles, -1)[tile:].flatten()
    if packed.scales is None or packed.scale_rows is None:
        return replace(packed, weights=weights, n=packed.n - first)
    scale_rows = packed.scale_rows[tile:]
    low = first // TILE if packed.scales.shape[0] * TILE == packed.n else 0  # one row of scales a tile: cut those too
    return replace(packed, weights=weights, scales=packed.scales[low:], scale_rows=scale_rows - low, n=packed.n - first)


def _trusted_form(state: SequenceState, weights: CudaWeights) -> bool:
    """Which form of the delta rule's inverse this card computes right: the fast one, else the slow one.

    Raises DecoderError where neither is.
    """
    for layer, cache in zip(weights.layers, state.layers, strict=True):
        if isinstance(cache, GdnCache) and isinstance(layer.mixer, GdnMixer):
            channels, taps = layer.mixer.small.conv.shape
            shape = (cache.state.shape[0], cache.state.shape[1], cache.state.shape[2])
            for by_blocks in (True, False):
                if is_right(shape, channels, taps, cache.state.device, by_blocks=by_blocks):
                    if not by_blocks:
                        log.warning("the delta rule by blocks is wrong on this card: prompts are read the slower way")
                    return by_blocks
            raise DecoderError(
                "this card and Triton compute the gated delta rule of a prompt wrong",
                "use another Triton version, or --device cpu; `pytest tests/decoder/kernels` shows what is wrong",
            )
    return True


def _has_cudnn_attention(config: ModelConfig, device: torch.device) -> bool:
    """Whether cuDNN attends at these heads; from sm_90 on it is also the faster one."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False

    def rows(heads: int) -> torch.Tensor:
        return torch.ones(1, heads, 64, config.head_dim, dtype=ACTIVATION, device=device)

    keys = rows(config.num_key_value_heads)
    try:
        output, log = _cudnn_attention(rows(config.num_attention_heads), keys, keys, causal=False)
    except RuntimeError:
        return False
    return log is not None and bool((output - 1).abs().max() < 1e-2)


def _cudnn_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool) -> Part:
    """(output [heads, T, head dim], log of the softmax's sum [heads, T])."""
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(query, keys, values, None, True, 0.0, causal)
    return result[0][0], result[1].view(result[0].shape[1:3])
