"""The architecture of a qwen3_5 checkpoint: every dimension named, anything unknown refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..errors import CheckpointError

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"
FP8_BLOCK = 128  # rows and columns that share one weight_scale_inv

_DIMENSIONS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)

# Settings that would change the arithmetic: the only value this decoder computes, also taken when the key is absent.
_FIXED_SETTINGS: dict[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mtp_use_dedicated_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Text model of a `qwen3_5` or `qwen3_5_text` config.json (MODEL section 1)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    max_position_embeddings: int
    layer_types: tuple[str, ...]  # FULL_ATTENTION or LINEAR_ATTENTION, one a layer
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int  # leading dimensions of a head that RoPE turns
    tie_word_embeddings: bool
    has_mtp: bool
    eos_token_ids: frozenset[int]

    @property
    def key_dim(self) -> int:
        """Width of all GDN keys (and of all GDN queries)."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all GDN values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the GDN convolution: q ‖ k ‖ v."""
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def from_directory(cls, model_dir: str | Path) -> Self:
        """Read config.json, and generation_config.json for its EOS ids.

        Raises CheckpointError for a missing or malformed file, another architecture, or a setting that is not computed.
        """
        directory = Path(model_dir)
        raw = _read_json(directory / "config.json")
        generation_file = directory / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.exists() else {}
        return cls.from_dict(raw, generation, where=str(directory / "config.json"))

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, where: str = "config"
    ) -> Self:
        """The same from parsed JSON; `where` names the source in errors."""
        text = _text_section(raw, where)
        _refuse_unsupported(raw, text, where)
        sizes = {name: _positive_int(text, name, where) for name in _DIMENSIONS}
        _check_ratio(sizes, "num_attention_heads", "num_key_value_heads", where)
        _check_ratio(sizes, "linear_num_value_heads", "linear_num_key_heads", where)
        theta, rotary_dim = _rope(text, sizes["head_dim"], where)
        return cls(
            **sizes,
            layer_types=_layer_types(text, sizes["num_hidden_layers"], where),
            rms_norm_eps=_positive_float(text.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
            rope_theta=theta,
            rotary_dim=rotary_dim,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            has_mtp=_num_mtp_layers(text, where) == 1,
            eos_token_ids=frozenset().union(*(_eos_ids(part, where) for part in (raw, text, generation or {}))),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", "Give the directory of a qwen3_5 checkpoint.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} holds {type(parsed).__name__}, expected a JSON object")
    return parsed


def _text_section(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    model_type = raw.get("model_type")
    if model_type == "qwen3_5_text":
        return raw
    if model_type == "qwen3_5":
        text = raw.get("text_config")
        if isinstance(text, dict):
            return text
        raise CheckpointError(f"{where}: model_type is qwen3_5 but there is no text_config object")
    raise CheckpointError(
        f"{where}: model_type is {model_type!r}, expected 'qwen3_5' or 'qwen3_5_text'",
        "This decoder runs one architecture; for other models measure an endpoint.",
    )


def _refuse_unsupported(raw: Mapping[str, Any], text: Mapping[str, Any], where: str) -> None:
    for key, computed in _FIXED_SETTINGS.items():
        if text.get(key, computed) != computed:
            raise CheckpointError(f"{where}: {key} is {text[key]!r}, this decoder computes only {computed!r}")
    quantization = raw.get("quantization_config") or text.get("quantization_config")
    if not quantization:
        return
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or block != [FP8_BLOCK, FP8_BLOCK]:
        raise CheckpointError(
            f"{where}: quantization_config has quant_method {method!r} and weight_block_size {block!r}, "
            f"expected 'fp8' and [{FP8_BLOCK}, {FP8_BLOCK}]"
        )


def _positive_int(text: Mapping[str, Any], name: str, where: str) -> int:
    value = text.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{where}: {name} is {value!r}, expected a positive integer")
    return value


def _positive_float(value: object, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"{where}: {name} is {value!r}, expected a positive number")
    return float(value)


def _check_ratio(sizes: Mapping[str, int], many: str, few: str, where: str) -> None:
    if sizes[many] % sizes[few]:
        raise CheckpointError(f"{where}: {many} {sizes[many]} is not a multiple of {few} {sizes[few]}")


def _rope(text: Mapping[str, Any], head_dim: int, where: str) -> tuple[float, int]:
    """(theta, rotated dimensions) from `rope_parameters`, or from the older `rope_scaling` with keys beside it."""
    rope = {**text, **(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(f"{where}: rope_type is {kind!r}, this decoder computes only 'default'")
    theta = _positive_float(rope.get("rope_theta"), "rope_theta", where)
    factor = _positive_float(rope.get("partial_rotary_factor", 0.25), "partial_rotary_factor", where)
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(f"{where}: partial_rotary_factor turns {rotary_dim} of {head_dim} dimensions")
    return theta, rotary_dim


def _layer_types(text: Mapping[str, Any], num_layers: int, where: str) -> tuple[str, ...]:
    types = text.get("layer_types")
    if types is None:
        interval = text.get("full_attention_interval", 4)
        return tuple(LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointError(f"{where}: layer_types does not list num_hidden_layers = {num_layers} layers")
    for index, kind in enumerate(types):
        if kind not in (FULL_ATTENTION, LINEAR_ATTENTION):
            raise CheckpointError(f"{where}: layer_types[{index}] is {kind!r}")
    return tuple(types)


def _num_mtp_layers(text: Mapping[str, Any], where: str) -> int:
    count = text.get("mtp_num_hidden_layers", 0)
    if count not in (0, 1):
        raise CheckpointError(f"{where}: mtp_num_hidden_layers is {count!r}, this decoder runs 0 or 1")
    return int(count)


def _eos_ids(section: Mapping[str, Any], where: str) -> frozenset[int]:
    given = section.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise CheckpointError(f"{where}: eos_token_id holds {token_id!r}, expected token ids")
    return frozenset(ids)
