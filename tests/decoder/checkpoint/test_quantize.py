"""Block FP8: scales that multiply, are not powers of two, fit ragged edges, and name what cannot be quantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.checkpoint.quantize import block_scales, quantize_checkpoint, quantize_rows
from kernarc.decoder.checkpoint.shapes import NAMED_SHAPES
from kernarc.decoder.checkpoint.synthetic import write_structured_checkpoint
from kernarc.decoder.checkpoint.weights import Checkpoint, Fp8Weight, load_weights
from kernarc.decoder.errors import CheckpointError
from safetensors.torch import load_file, save_file

GENERATOR = torch.Generator().manual_seed(0)
# 192 = 1.5 blocks, 320 = 2.5 blocks: every kind of linear has a ragged edge
RAGGED = {"hidden_size": 192, "intermediate_size": 320, "vocab_size": 200, "linear_value_head_dim": 48}


UP = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantize")
    (directory / "shape.json").write_text(json.dumps(NAMED_SHAPES["tiny"] | RAGGED))
    write_structured_checkpoint(str(directory / "shape.json"), directory / "source")
    (directory / "source" / "tokenizer_config.json").write_text("{}")
    return directory / "source"


@pytest.mark.parametrize("shape", [(128, 128), (129, 257), (1, 1), (300, 130)])
def test_every_weight_is_within_half_a_step_of_e4m3(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=GENERATOR) * 0.05
    scales = block_scales(weight)
    assert (scales.dtype, tuple(scales.shape)) == (torch.bfloat16, (-(-shape[0] // 128), -(-shape[1] // 128)))
    values = quantize_rows(weight, scales, 0)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = weight[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            stored = values[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128].float()
            scale = float(scales[row, column])
            error = (stored * scale - block).abs()
            # e4m3: 3 mantissa bits, so half a step is 2^-4 of the value; below 2^-6 steps are 2^-9
            assert bool((error <= torch.maximum(block.abs() * 2**-4, torch.tensor(scale * 2**-10)) * 1.001).all())
            assert float(stored.abs().max()) > 440  # the whole range is used, nothing is cut off
            assert scale * 448 >= float(block.abs().max())


def test_scales_are_not_rounded_to_powers_of_two() -> None:
    scales = block_scales(torch.randn(1024, 1024, generator=GENERATOR)).float()
    assert (torch.frexp(scales).mantissa != 0.5).float().mean() > 0.9


def test_a_block_of_zeros_and_a_tiny_one() -> None:
    weight = torch.zeros(128, 256)
    weight[:, 128:] = 1e-37
    values = quantize_rows(weight, block_scales(weight), 0)
    assert values.float().isfinite().all()
    assert float(values[:, :128].float().abs().max()) == 0


def test_a_checkpoint_comes_back_close_and_complete(source: Path, tmp_path: Path) -> None:
    n_bytes = quantize_checkpoint(source, tmp_path / "fp8")
    config = ModelConfig.from_directory(tmp_path / "fp8")
    before = load_weights(Checkpoint(source, config), torch.float32, with_mtp=True)
    stored = dict(Checkpoint(tmp_path / "fp8", config).stream())
    assert set(stored) == set(before)
    quantised = {name for name, tensor in stored.items() if isinstance(tensor, Fp8Weight)}
    kinds = [
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
    ]
    assert {name.split(".")[-2] for name in quantised} == set(kinds)
    assert {name.split(".")[-2] for name in quantised if name.startswith("mtp.")} == {*kinds[:4], *kinds[7:]}
    for name, tensor in stored.items():
        if isinstance(tensor, Fp8Weight):
            error = (tensor.dequantize(torch.float32) - before[name]).norm() / before[name].norm()
            assert error < 0.03
        else:
            assert torch.equal(tensor.float(), before[name])
    assert n_bytes < 0.7 * sum(2 * tensor.numel() for tensor in before.values())
    assert (tmp_path / "fp8" / "tokenizer_config.json").exists()
    raw = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert raw["quantization_config"]["quant_method"] == "fp8"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t[UP].view(-1)[5:6].fill_(float("nan")), "up_proj.* NaN or inf.* rows 0"),
        (lambda t: t[UP].view(-1)[-1:].fill_(float("inf")), "up_proj.* rows 256 … 319"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight is missing"),
    ],
)
def test_what_cannot_be_quantised_is_named(source: Path, tmp_path: Path, change: Any, said: str) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    (tmp_path / "bad").mkdir()
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    (tmp_path / "bad" / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=said):
        quantize_checkpoint(tmp_path / "bad", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_fp8_is_not_quantised_again(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "fp8")
    with pytest.raises(CheckpointError, match=r"in_proj_qkv.* is F8_E4M3 already"):
        quantize_checkpoint(tmp_path / "fp8", tmp_path / "again")
    with pytest.raises(CheckpointError, match="already exists"):
        quantize_checkpoint(source, tmp_path / "fp8")
