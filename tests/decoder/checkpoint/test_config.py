"""config.json: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.errors import CheckpointError

from ...fakes.decoder_checkpoints import BASE

WITHOUT = object()


def changed(**changes: Any) -> dict[str, Any]:
    """BASE with keys set, or taken out by WITHOUT."""
    return {key: value for key, value in {**BASE, **changes}.items() if value is not WITHOUT}


def test_every_dimension_is_read() -> None:
    config = ModelConfig.from_dict(changed(num_hidden_layers=9, linear_value_head_dim=24))
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (211, 64, 96)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.key_dim, config.value_dim, config.conv_dim) == (32, 96, 160)
    assert [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"] == [3, 7]
    assert (config.rope_theta, config.rotary_dim, config.rms_norm_eps) == (1e7, 4, 1e-6)
    assert (config.tie_word_embeddings, config.has_mtp) == (False, True)
    assert config.eos_token_ids == {210}


def test_a_multimodal_config_gives_the_same_model() -> None:
    text = changed(tie_word_embeddings=WITHOUT)
    raw = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 3}, "tie_word_embeddings": True}
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(changed(tie_word_embeddings=True))


def test_rope_settings_of_older_files() -> None:
    older = changed(
        rope_parameters=WITHOUT,
        rope_theta=5e6,
        partial_rotary_factor=0.5,
        rope_scaling={"rope_type": "default", "mrope_section": [1, 1, 1]},
    )
    config = ModelConfig.from_dict(older)
    assert (config.rope_theta, config.rotary_dim) == (5e6, 8)


def test_eos_ids_of_all_files_are_joined(tmp_path: Path) -> None:
    raw = {"model_type": "qwen3_5", "text_config": changed(eos_token_id=7), "eos_token_id": [8]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == {7, 8, 9}
    assert ModelConfig.from_dict(changed(eos_token_id=None)).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected 'qwen3_5' or 'qwen3_5_text'"),
        ({"model_type": "qwen3_5"}, "model_type is qwen3_5 but there is no text_config object"),
        ({"hidden_size": WITHOUT}, "hidden_size is None, expected a positive integer"),
        ({"vocab_size": "many"}, "vocab_size is 'many', expected a positive integer"),
        ({"head_dim": 0}, "head_dim is 0, expected a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected a positive integer"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 is not a multiple of num_key_value_heads 2"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', this decoder computes only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, this decoder computes only False"),
        ({"attn_output_gate": False}, "attn_output_gate is False, this decoder computes only True"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2, this decoder runs 0 or 1"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {}}, "rope_theta is None, expected a positive number"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 2}}, "turns 32 of 16 dimensions"),
        ({"layer_types": ["full_attention"]}, "layer_types does not list num_hidden_layers = 4 layers"),
        ({"layer_types": ["full_attention", "mamba"] * 2}, r"layer_types\[1\] is 'mamba'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a positive number"),
        ({"eos_token_id": "</s>"}, "eos_token_id holds '</s>', expected token ids"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"quant_method 'gptq' and weight_block_size None, expected 'fp8' and \[128, 128\]",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"weight_block_size \[64, 64\]",
        ),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(**changes)))
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_directory(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.message


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), ("{", "cannot be read"), ("[1]", "holds list, expected a JSON")]
)
def test_unreadable_files(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_directory(tmp_path)
