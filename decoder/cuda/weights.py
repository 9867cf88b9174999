"""Checkpoint tensors to the device, one layer at a time: fused, packed for the kernels, the originals freed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from ..checkpoint.config import ModelConfig
from ..checkpoint.draft_vocabulary import DraftVocabulary
from ..checkpoint.quantize import block_scales, quantize_rows
from ..checkpoint.weights import Checkpoint, Fp8Weight, is_fp8_linear
from ..errors import CheckpointError
from .kernels.gdn_prepare import GdnWeights
from .kernels.packing import UNIT_ROWS, PackedLinear, pack_bf16, pack_fp8, quantise
from .kernels.screened_head import ScreenedHead

Stored = torch.Tensor | Fp8Weight
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True)
class GdnMixer:
    """Gated DeltaNet: rows of `qkvz` are q ‖ k ‖ v ‖ z."""

    qkvz: PackedLinear
    out: PackedLinear
    small: GdnWeights


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """Gated attention: rows of `qkv` are [q ‖ gate] a head, then keys, then values."""

    qkv: PackedLinear
    out: PackedLinear
    norm_q: torch.Tensor
    norm_k: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    in_norm: torch.Tensor
    mixer: GdnMixer | AttentionMixer
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear

    def linears(self) -> list[PackedLinear]:
        """Every packed matrix."""
        first = self.mixer.qkvz if isinstance(self.mixer, GdnMixer) else self.mixer.qkv
        return [first, self.mixer.out, self.gate_up, self.down]


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The MTP head; it shares the embedding and the vocabulary head."""

    norm_embedding: torch.Tensor
    norm_hidden: torch.Tensor
    fc: PackedLinear
    layer: LayerWeights
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class CudaWeights:
    """A whole model on the device."""

    embedding: torch.Tensor  # bf16 [V, D]
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: ScreenedHead
    draft_head: PackedLinear
    mtp: MtpWeights | None
    draft_ids: torch.Tensor | None = None  # int64 [V'], the token of each row of a reduced draft head

    def linears(self) -> list[PackedLinear]:
        """Every packed matrix."""
        packed = [self.head.screen, self.draft_head]
        layers = self.layers + ([self.mtp.layer] if self.mtp else [])
        packed += [linear for layer in layers for linear in layer.linears()]
        return packed + ([self.mtp.fc] if self.mtp else [])


def load_cuda_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: torch.device,
    *,
    with_mtp: bool,
    fp8_drafts: bool = True,
    draft_vocabulary: DraftVocabulary | None = None,
    quantize: bool = False,
) -> CudaWeights:
    """Stream the checkpoint straight to `device`: at most one layer is held twice.

    quantize: make the linears that an FP8 checkpoint stores as FP8 so where this one does not, exactly as `model
    quantize` would have written them.

    fp8_drafts: drafts come from block-FP8 copies of the vocabulary head and of `mtp.fc`, half the bytes.
    draft_vocabulary: only these rows of it. The verify head decides by its rows as stored: the output does not change.
    Raises CheckpointError for tensors that do not pack.
    """
    layers: list[LayerWeights] = []
    outside: dict[str, Stored] = {}
    mtp: MtpWeights | None = None
    stream = _stream(checkpoint, device, with_mtp)
    if quantize:
        stream = ((name, _quantised(name, stored)) for name, stored in stream)
    for prefix, group in groupby(stream, key=lambda item: _group(item[0])):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in group}
        if prefix.startswith("model.layers."):
            layers.append(_layer(tensors, prefix))
        elif prefix == "mtp.":
            mtp = _mtp(tensors, fp8_drafts)
        else:
            outside |= {prefix + name: tensor for name, tensor in tensors.items()}
    embedding = _dense(outside[_EMBEDDING])
    head = _dense(outside.pop(_HEAD)) if not config.tie_word_embeddings else embedding
    verify_head = ScreenedHead.build(head, name=_HEAD)
    draft_ids = None
    draft_head = verify_head.screen
    if with_mtp and draft_vocabulary is not None:
        draft_ids = draft_vocabulary.rows(UNIT_ROWS, config.vocab_size).to(device)
        head = head[draft_ids]
        draft_head = pack_fp8([quantise(head)], name=_HEAD)
    if with_mtp and not fp8_drafts:
        draft_head = pack_bf16(head, name=_HEAD)
    return CudaWeights(embedding, layers, _vector(outside[_NORM]), verify_head, draft_head, mtp, draft_ids)


def _stream(checkpoint: Checkpoint, device: torch.device, with_mtp: bool) -> Iterator[tuple[str, Stored]]:
    return checkpoint.stream(device=str(device), skip_mtp=not with_mtp)


def _quantised(name: str, stored: Stored) -> Stored:
    if isinstance(stored, Fp8Weight) or not is_fp8_linear(name):
        return stored
    weight = stored.float()
    if not bool(weight.isfinite().all()):
        raise CheckpointError(f"{name} holds NaN or infinity", "a block with such a value has no scale")
    scales = block_scales(weight)
    return Fp8Weight(quantize_rows(weight, scales, 0), scales)


def _group(name: str) -> str:
    if name.startswith("model.layers."):
        return ".".join(name.split(".")[:3]) + "."
    return "mtp." if name.startswith("mtp.") else ""


def _dense(stored: Stored) -> torch.Tensor:
    return stored.dequantize(torch.bfloat16) if isinstance(stored, Fp8Weight) else stored.to(torch.bfloat16)


def _vector(stored: Stored, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    assert isinstance(stored, torch.Tensor), "only matrices are FP8"
    return stored.to(dtype).contiguous()


def _pack(parts: list[Stored], name: str, *, interleave: bool = False) -> PackedLinear:
    fp8 = [(part.values, part.scale_inv) for part in parts if isinstance(part, Fp8Weight)]
    if len(fp8) == len(parts):
        return pack_fp8(fp8, interleave=interleave, name=name)
    return pack_bf16(torch.cat([_dense(part) for part in parts]), name=name)


def _layer(tensors: dict[str, Stored], prefix: str) -> LayerWeights:
    is_gdn = "linear_attn.in_proj_qkv.weight" in tensors
    return LayerWeights(
        _vector(tensors["input_layernorm.weight"]),
        _gdn(tensors, prefix) if is_gdn else _attention(tensors, prefix),
        _vector(tensors["post_attention_layernorm.weight"]),
        _pack(
            [tensors["mlp.gate_proj.weight"], tensors["mlp.up_proj.weight"]], prefix + "mlp.gate_proj", interleave=True
        ),
        _pack([tensors["mlp.down_proj.weight"]], prefix + "mlp.down_proj"),
    )


def _gdn(tensors: dict[str, Stored], prefix: str) -> GdnMixer:
    def own(name: str) -> Stored:
        return tensors["linear_attn." + name]

    small = GdnWeights(
        _vector(own("in_proj_b.weight")),
        _vector(own("in_proj_a.weight")),
        _vector(own("A_log"), torch.float32),
        _vector(own("dt_bias"), torch.float32),
        _vector(own("conv1d.weight"), torch.float32).squeeze(1),
        _vector(own("norm.weight")),
    )
    qkvz = _pack([own("in_proj_qkv.weight"), own("in_proj_z.weight")], prefix + "linear_attn.in_proj_qkv")
    return GdnMixer(qkvz, _pack([own("out_proj.weight")], prefix + "linear_attn.out_proj"), small)


def _attention(tensors: dict[str, Stored], prefix: str) -> AttentionMixer:
    qkv = [tensors[f"self_attn.{part}_proj.weight"] for part in "qkv"]
    return AttentionMixer(
        _pack(qkv, prefix + "self_attn.q_proj"),
        _pack([tensors["self_attn.o_proj.weight"]], prefix + "self_attn.o_proj"),
        _vector(tensors["self_attn.q_norm.weight"]),
        _vector(tensors["self_attn.k_norm.weight"]),
    )


def _mtp(tensors: dict[str, Stored], fp8_drafts: bool) -> MtpWeights:
    layer = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items() if name.startswith("layers.0.")}
    fc = tensors["fc.weight"]
    return MtpWeights(
        _vector(tensors["pre_fc_norm_embedding.weight"]),
        _vector(tensors["pre_fc_norm_hidden.weight"]),
        _pack([Fp8Weight(*quantise(_dense(fc))) if fp8_drafts else fc], "mtp.fc"),
        _layer(layer, "mtp.layers.0."),
        _vector(tensors["norm.weight"]),
    )
