"""Random checkpoints of several shapes, written once a session, and where kernels run here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernarc.decoder.native.build import NativeUnavailableError, find_compiler

from ..fakes.decoder_checkpoints import Layout, RandomCheckpoint, write_checkpoint

SHAPES: dict[str, tuple[dict[str, Any], Layout]] = {
    "base": ({}, Layout()),
    "one_kv_head-tied": (
        {
            "hidden_size": 48,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 24,
            "tie_word_embeddings": True,
        },
        Layout(),
    ),
    "no_groups-sharded": (
        {
            "num_hidden_layers": 8,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
        },
        Layout(num_shards=3),
    ),
    "fp8-multimodal": (
        {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 4},
        Layout(fp8=True, num_shards=2, multimodal=True),
    ),
    "attention_first": (
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        Layout(),
    ),
}


def require_compiler() -> None:
    """Skip where the C++ cannot be compiled at all; a compiler that fails on our sources is an error."""
    try:
        find_compiler()
    except NativeUnavailableError as error:
        pytest.skip(f"no native path: {error}")


@pytest.fixture(scope="session", params=["plain", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    """Both paths on a CPU."""
    if request.param == "native":
        require_compiler()
    return bool(request.param == "native")


@pytest.fixture(scope="session", params=SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RandomCheckpoint:
    """Each shape in turn."""
    changes, layout = SHAPES[request.param]
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / request.param, changes, layout)


@pytest.fixture(scope="session")
def base_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> RandomCheckpoint:
    """The BASE shape alone."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "base")


@pytest.fixture
def device() -> str:
    """Where kernels run: on the card where there is one, else in Triton's interpreter (tests/conftest.py)."""
    return "cuda" if torch.cuda.is_available() else "cpu"
