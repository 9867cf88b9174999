"""Small fully random qwen3_5 checkpoints, and transformers' model on the very same weights.

Names and shapes come from transformers' own module, not from the code under test; only the `mtp.` tensors, which
transformers does not know, are listed here by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

FP8_SUFFIXES = tuple(
    f"{name}.weight"
    for name in (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "in_proj_qkv",
        "in_proj_z",
        "out_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
)

BASE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 210,
}


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is stored."""

    fp8: bool = False
    num_shards: int = 1
    multimodal: bool = False  # text_config, `model.language_model.` names and vision tensors


@dataclass(frozen=True)
class RandomCheckpoint:
    """A checkpoint on disk and its weights in fp32, dequantised here, by their text-only names."""

    path: Path
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]

    def reference(self) -> Qwen3_5ForCausalLM:
        """transformers' model on these weights, fp32, eager attention."""
        model = _transformers_model(self.config)
        target = {name: tensor for name, tensor in self.weights.items() if not name.startswith("mtp.")}
        if self.config["tie_word_embeddings"]:
            target["lm_head.weight"] = target["model.embed_tokens.weight"]
        model.load_state_dict(target)
        return model


def write_checkpoint(
    path: Path, changes: Mapping[str, Any] | None = None, layout: Layout | None = None, *, seed: int = 0
) -> RandomCheckpoint:
    """Write a random checkpoint of the BASE shape with `changes` in the given layout."""
    layout = layout or Layout()
    config = {**BASE, **(changes or {})}
    stored, weights = _stored(random_weights(config, seed), layout)
    path.mkdir(parents=True)
    raw: dict[str, Any] = config
    if layout.multimodal:
        stored = {_multimodal_name(name): tensor for name, tensor in stored.items()}
        stored["model.visual.patch_embed.proj.weight"] = torch.randn(8, 3, 2, 4, 4).bfloat16()
        text = {**config, "model_type": "qwen3_5_text"}
        raw = {
            "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": {"depth": 1},
            "tie_word_embeddings": config["tie_word_embeddings"],
        }
    if layout.fp8:
        raw = {**raw, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (path / "config.json").write_text(json.dumps(raw))
    save_shards(path, stored, layout.num_shards)
    return RandomCheckpoint(path, config, weights)


def random_weights(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor in fp32: activations of order one, states that both remember and forget, norms away from one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            noise = torch.rand(shape, generator=generator).mul(4).sub(4)  # rates e^-4 … 1
        elif name.endswith("linear_attn.norm.weight"):
            noise = 1 + 0.2 * noise
        elif name.endswith("conv1d.weight"):
            noise = 0.5 * noise
        elif name.endswith(("embed_tokens.weight", "dt_bias")):
            pass
        elif len(shape) == 1:
            noise = 0.2 * noise
        else:
            noise = noise * (1.5 / shape[1] ** 0.5)
        weights[name] = noise
    return weights


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' module, then the MTP head's."""
    model = _transformers_model(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    if config["mtp_num_hidden_layers"]:
        hidden = config["hidden_size"]
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{norm}.weight"] = (hidden,)
        attention = _transformers_model({**config, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
        prefix = "model.layers.0."
        for name, tensor in attention.state_dict().items():
            if name.startswith(prefix):
                shapes["mtp.layers.0." + name.removeprefix(prefix)] = tuple(tensor.shape)
    return shapes


def save_shards(path: Path, tensors: Mapping[str, torch.Tensor], num_shards: int) -> None:
    """One model.safetensors, or `num_shards` files with an index; scales may land in another file than their matrix."""
    if num_shards == 1:
        save_file(dict(tensors), path / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % num_shards == shard}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _transformers_model(config: Mapping[str, Any]) -> Qwen3_5ForCausalLM:
    text = {key: value for key, value in config.items() if key != "model_type"}
    reference_config = Qwen3_5TextConfig(**text)
    reference_config._attn_implementation = "eager"
    build: Any = Qwen3_5ForCausalLM  # untyped
    model: Qwen3_5ForCausalLM = build(reference_config).float().eval()
    return model


def _stored(
    weights: Mapping[str, torch.Tensor], layout: Layout
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(what the file holds, the same values in fp32)."""
    stored, values = {}, {}
    for name, tensor in weights.items():
        if layout.fp8 and name.endswith(FP8_SUFFIXES):
            stored[name], stored[name + "_scale_inv"], values[name] = _quantize(tensor)
        else:
            stored[name] = tensor.bfloat16().contiguous()
            values[name] = stored[name].float()
    return stored, values


def _quantize(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(e4m3 values, bf16 scale_inv a 128×128 block, the product in fp32), block by block."""
    rows, columns = matrix.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128), dtype=torch.bfloat16)
    product = torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = matrix[block].abs().max() / 448
            values[block] = (matrix[block] / scales[i, j].float()).to(torch.float8_e4m3fn)
            product[block] = values[block].float() * scales[i, j].float()
    return values, scales, product


def _multimodal_name(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
