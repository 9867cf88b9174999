"""Prefill: the prompt in pieces through dense matrix products on weights unpacked one matrix at a time."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ..cancellation import raise_if_cancelled
from ..checkpoint.config import ModelConfig
from ..errors import DecoderError
from .attention import CUDNN_ROWS, attend, has_cudnn_attention
from .kernels.fp8_rows import Fp8Rows, quantise_rows
from .kernels.fp8_swiglu import runs_fp8_swiglu
from .kernels.gdn_prefill import TRITON, Form, forms, gdn_prefill, is_right
from .kernels.gdn_prepare import GdnCache
from .kernels.launch import RING
from .kernels.norm import rms_norm
from .kernels.packing import TILE, PackedLinear
from .kernels.prefill import Out, add_norm, gated_norm, merge_and_gate, prompt_gates, swiglu
from .kernels.prefill_fp8 import check_fp8_products, fits, fp8_linear, fp8_mlp_inner
from .kernels.prompt_rope import prompt_rope
from .kernels.unpack import unpack_into
from .state import ACTIVATION, AttentionCache, SequenceState
from .weights import AttentionMixer, CudaWeights, GdnMixer, LayerWeights

log = logging.getLogger("kernarc.decoder")
PIECE_ROWS = 32768  # prompt tokens read in one pass; every weight is unpacked once a pass
# A shorter pass is bound by the host, which needs 0.45 ms for an FP8 product (cuBLAS chooses anew every time): 128
# tokens took 146 ms on an H200, the card being busy for 28 of them, and 70 ms in bf16.
FP8_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Normed:
    """Normalised rows, as whoever reads them wants them: the layer's products perhaps in FP8, its gates never."""

    wide: torch.Tensor | None
    fp8: Fp8Rows | None

    @property
    def for_product(self) -> Out:
        """What the next product multiplies."""
        if self.fp8 is not None:
            return self.fp8
        return self.for_gates

    @property
    def for_gates(self) -> torch.Tensor:
        """The values in the dense type."""
        assert self.wide is not None, "made for a product only"
        return self.wide


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
        self.fp8_rows = FP8_ROWS  # passes of fewer rows multiply in `dtype`
        self._pass_in_fp8 = False
        device = weights.embedding.device
        if fp8:
            check_fp8_products(device)
        self._one_swiglu = fp8 and runs_fp8_swiglu(device)
        self._cudnn = device.type == "cuda" and has_cudnn_attention(config, device)
        self._delta_rule = TRITON if device.type != "cuda" else _trusted_form(state, weights)
        self._dense = torch.empty(max(packed.n * packed.k for packed in self._linears()), dtype=dtype, device=device)

        self._gate_weights = {  # b and a of every GDN layer in one product
            id(layer.mixer): torch.cat([layer.mixer.small.w_b, layer.mixer.small.w_a]).to(dtype)
            for layer in weights.layers
            if isinstance(layer.mixer, GdnMixer)
        }
        self._mtp_mixer: AttentionMixer | None = None  # without its queries, where those can be cut off
        if weights.mtp is not None and isinstance(mixer := weights.mtp.layer.mixer, AttentionMixer):
            keys = rows_from(mixer.qkv, 2 * config.num_attention_heads * config.head_dim)
            self._mtp_mixer = None if keys is None else replace(mixer, qkv=keys)

    def plan_attention(self) -> None:
        """Have cuDNN plan every size of piece that the window holds, alone and behind another of its size."""
        cache = next((cache for cache in self.state.layers if isinstance(cache, AttentionCache)), None)
        if cache is None or not self._cudnn:
            return
        keys, values = cache.keys[None], cache.values[None]
        for rows in CUDNN_ROWS:
            query = keys.new_zeros(1, self.config.num_attention_heads, rows, self.config.head_dim)
            for end in (rows, 2 * rows):
                if end < keys.shape[2]:
                    attend(query, keys[:, :, :end], values[:, :, :end], end - rows, cudnn=True)

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
        # By way of an array, four times as fast as torch.tensor: 2 ms of 65,536 ids.
        prompt = torch.frombuffer(array("q", prompt_ids), dtype=torch.int64).to(self.weights.embedding.device)
        length = len(prompt)
        for start, end in self._pieces(length):
            raise_if_cancelled()
            self.state.set_positions(start, start, start)
            self._pass_in_fp8 = self.fp8 and end - start >= self.fp8_rows
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
        layers = self.weights.layers
        stream = self.weights.embedding[token_ids].float()
        normed = Normed(self._normed(stream, layers[0].in_norm), None)
        next_norms = [*(layer.in_norm for layer in layers[1:]), self.weights.norm]
        next_mixers = [*(layer.mixer for layer in layers[1:]), None]
        for layer, cache, norm, mixer in zip(layers, self.state.layers, next_norms, next_mixers, strict=True):
            if isinstance(layer.mixer, GdnMixer):
                assert isinstance(cache, GdnCache)
                mixed = self._gated_delta_net(normed, layer.mixer, cache, start)
            else:
                assert isinstance(cache, AttentionCache)
                mixed = self._attention(normed.for_product, layer.mixer, cache, start)
            normed = self._add_norm(
                stream, self._product(mixed, layer.mixer.out), layer.mlp_norm, layer.gate_up, tiled=self._fuses(layer)
            )
            has_gates = isinstance(mixer, GdnMixer)
            reader = None if mixer is None else mixer.qkvz if isinstance(mixer, GdnMixer) else mixer.qkv
            normed = self._add_norm(stream, self._mlp(normed.for_product, layer), norm, reader, with_wide=has_gates)
        return normed.for_gates

    def _add_norm(
        self, stream: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, reader: PackedLinear | None,
        *, with_wide: bool = False, tiled: bool = False,
    ) -> Normed:  # fmt: skip
        """stream += y; its norm, in FP8 (or its tiles) where `reader` multiplies so, and then wide only on request."""
        in_fp8 = reader is not None and self._in_fp8(reader)
        fp8 = Fp8Rows.empty(len(y), y.shape[1], y.device, tiled=tiled) if in_fp8 else None
        wide = torch.empty_like(y) if with_wide or fp8 is None else None
        add_norm(stream, y, weight, self.config.rms_norm_eps, wide=wide, fp8=fp8)
        return Normed(wide, fp8)

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

    def _fuses(self, layer: LayerWeights) -> bool:
        return self._one_swiglu and self._in_fp8(layer.gate_up) and self._in_fp8(layer.down)

    def _mlp(self, normed: Out, layer: LayerWeights) -> torch.Tensor:
        if isinstance(normed, Fp8Rows) and normed.tiled:
            return self._product(fp8_mlp_inner(normed, layer.gate_up, self._dense.view(torch.uint8)), layer.down)
        gate_up = self._product(normed, layer.gate_up)
        return self._product(swiglu(gate_up, self._room(len(gate_up), layer.down)), layer.down)

    def _gated_delta_net(self, normed: Normed, mixer: GdnMixer, cache: GdnCache, start: int) -> Out:
        small, channels = mixer.small, self.config.conv_dim
        rows, gate_rows = self._product(normed.for_product, mixer.qkvz), normed.for_gates
        g, beta = prompt_gates(F.linear(gate_rows, self._gate_weights[id(mixer)]), small.a_log, small.dt_bias)
        o = gdn_prefill(rows, cache.raw, small.conv, g, beta, cache.state, start, self._delta_rule)
        kept = torch.arange(max(0, len(rows) - RING.value), len(rows), device=rows.device)
        cache.raw[(start + kept) % RING.value] = rows[kept, :channels].to(ACTIVATION)
        room = self._room(len(rows), mixer.out)
        return gated_norm(o, rows[:, channels:], small.norm, self.config.rms_norm_eps, room)

    def _attention(self, normed: Out, mixer: AttentionMixer, cache: AttentionCache, start: int) -> Out:
        query, projected = self._project(normed, mixer, cache)
        end = start + len(projected)
        heads_first = query.transpose(0, 1)[None]  # [1, heads, T, head dim]
        keys, values = cache.keys[None, :, :end], cache.values[None, :, :end]
        inside, past = attend(heads_first, keys, values, start, cudnn=self._cudnn)
        return merge_and_gate(inside, past, projected, self._room(len(projected), mixer.out))

    def _project(self, normed: Out, mixer: AttentionMixer, cache: AttentionCache) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries fp16 [T, heads, head dim], the projection [T, …]); keys and values go into the cache.

        Of a projection without its query rows there are no queries.
        """
        config = self.config
        rows = self._product(normed, mixer.qkv)
        heads = rows.shape[1] // (2 * config.head_dim) - config.num_key_value_heads
        query = torch.empty(len(rows), heads, config.head_dim, dtype=ACTIVATION, device=rows.device)
        prompt_rope(
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

    def _in_fp8(self, packed: PackedLinear) -> bool:
        return self._pass_in_fp8 and fits(packed)

    def _room(self, rows: int, reader: PackedLinear) -> Out:
        """For what `reader` multiplies, in its format."""
        device = self._dense.device
        if self._in_fp8(reader):
            return Fp8Rows.empty(rows, reader.k, device)
        return torch.empty(rows, reader.k, dtype=self.dtype, device=device)

    def _product(self, x: Out, packed: PackedLinear) -> torch.Tensor:
        if self._in_fp8(packed):
            rows = x if isinstance(x, Fp8Rows) else quantise_rows(x)
            return fp8_linear(rows, packed, self._dense.view(torch.uint8), self.dtype)
        assert isinstance(x, torch.Tensor)
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


def _trusted_form(state: SequenceState, weights: CudaWeights) -> Form:
    """The fastest form of the delta rule that this card computes right.

    Raises DecoderError where none is.
    """
    for layer, cache in zip(weights.layers, state.layers, strict=True):
        if isinstance(cache, GdnCache) and isinstance(layer.mixer, GdnMixer):
            channels, taps = layer.mixer.small.conv.shape
            heads, key_dim, value_dim = cache.state.shape
            for form in forms(cache.state.device, key_dim, value_dim, taps):
                if is_right((heads, key_dim, value_dim), channels, taps, cache.state.device, form):
                    return form
                log.warning("the delta rule of a prompt is wrong on this card in %s: trying a slower form", form.name)
            raise DecoderError(
                "this card computes the gated delta rule of a prompt wrong",
                "use --device cpu; `pytest tests/decoder/cuda` shows what is wrong",
            )
    return TRITON
