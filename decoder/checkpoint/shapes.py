"""Configurations of structured checkpoints: `tiny`, `27b` and any text configuration given by path."""

import copy
import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .config import FP8_BLOCK, ModelConfig
from .layout import checkpoint_tensors

RawConfig = dict[str, Any]

_COMMON: RawConfig = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "use_cache": True,
}

# Small enough for two CPU cores, every linear a multiple of 128, grouped heads in both kinds of layer.
_TINY: RawConfig = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 32768,
    "eos_token_id": 2047,
}

# Qwen3.8-27B's text model.
_27B: RawConfig = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "eos_token_id": 248044,
}

NAMED_SHAPES: dict[str, RawConfig] = {"tiny": _COMMON | _TINY, "27b": _COMMON | _27B}


def read_shape(shape: str) -> RawConfig:
    """config.json's content for `tiny`, `27b`, or a path to a config.json or its directory; text-only, with MTP."""
    if shape in NAMED_SHAPES:
        return copy.deepcopy(NAMED_SHAPES[shape])
    path = Path(shape)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise CheckpointError(
            f"no shape named {shape!r} and no configuration at that path",
            f"use one of {', '.join(NAMED_SHAPES)}, or the path of a config.json",
        )
    return {"mtp_num_hidden_layers": 1} | text_only_config(path)


def text_only_config(path: Path) -> RawConfig:
    """The text part of a config.json as that of an unquantised text-only checkpoint. Raises CheckpointError."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    text = given.get("text_config", given) if isinstance(given, dict) else None
    if not isinstance(text, dict):
        raise CheckpointError(f"{path} holds no JSON object of a text model")
    outer = {key: given[key] for key in ("tie_word_embeddings", "eos_token_id") if key in given}
    raw = {key: value for key, value in (text | outer).items() if key != "quantization_config"}
    raw |= {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    if isinstance(raw.get("rope_parameters"), dict):  # sections are equal for text, and vLLM refuses them there
        raw["rope_parameters"] = {k: v for k, v in raw["rope_parameters"].items() if not k.startswith("mrope")}
    return raw


def fp8_config(raw: RawConfig, config: ModelConfig) -> RawConfig:
    """The same configuration with the published FP8 checkpoints' quantization_config."""
    keep = [
        spec.name.removesuffix(".weight")
        for spec in checkpoint_tensors(config)
        if len(spec.shape) > 1 and not spec.is_fp8_linear
    ]
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted(keep),
    }
    return raw | {"quantization_config": quantization}
