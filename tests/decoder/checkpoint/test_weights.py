"""Loading: every value arrives, and whatever is not the model of config.json is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.checkpoint.weights import Checkpoint, Fp8Weight, is_fp8_linear, load_weights, tensor_shapes
from kernarc.decoder.errors import CheckpointError
from kernarc.decoder.generate import Decoder
from safetensors.torch import load_file, save_file

from ...fakes.decoder_checkpoints import BASE, FP8_SUFFIXES, Layout, RandomCheckpoint, write_checkpoint
from ...fakes.decoder_checkpoints import tensor_shapes as expected_shapes

Tensors = dict[str, torch.Tensor]
Q_PROJ = "model.layers.3.self_attn.q_proj.weight"


def opened(path: Path) -> Checkpoint:
    return Checkpoint(path, ModelConfig.from_directory(path))


def test_names_and_shapes_are_transformers_own(checkpoint: RandomCheckpoint) -> None:
    assert tensor_shapes(ModelConfig.from_dict(checkpoint.config)) == expected_shapes(checkpoint.config)


def test_fp8_linears_are_those_of_the_published_checkpoint() -> None:
    """MODEL section 1: the large linears and the same seven of the MTP layer; head, embedding, fc, a, b, conv not."""
    for name in tensor_shapes(ModelConfig.from_dict(BASE)):
        assert is_fp8_linear(name) == name.endswith(FP8_SUFFIXES)
    assert not any(map(is_fp8_linear, ("mtp.fc.weight", "lm_head.weight", "model.layers.0.linear_attn.A_log")))


def test_every_value_arrives(checkpoint: RandomCheckpoint) -> None:
    """Both name prefixes, shards, FP8: equal to the values the fixture stored, bit for bit."""
    loaded = load_weights(opened(checkpoint.path), torch.float32, with_mtp=True)
    assert loaded.keys() == checkpoint.weights.keys()
    for name, tensor in checkpoint.weights.items():
        assert torch.equal(loaded[name], tensor), name
    without = load_weights(opened(checkpoint.path), torch.float32, with_mtp=False)
    assert without.keys() == {name for name in checkpoint.weights if not name.startswith("mtp.")}


def test_ragged_fp8_blocks_multiply() -> None:
    """[129, 257] has 2 × 3 scales; every one of them reaches its own block and no other."""
    values = torch.ones(129, 257).to(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0, 3.0, 5.0], [7.0, 11.0, 13.0]]).bfloat16()
    out = Fp8Weight(values, scale).dequantize(torch.float32)
    assert out[0, [0, 127, 128, 255, 256]].tolist() == [2, 2, 3, 3, 5]
    assert out[[0, 127, 128], 0].tolist() == [2, 2, 7]
    assert [int((out == value).sum()) for value in (2, 3, 5, 7, 11, 13)] == [128**2, 128**2, 128, 128, 128, 1]


def test_scales_are_not_rounded_to_powers_of_two() -> None:
    """vllm#37804."""
    scale = torch.tensor([[0.0123]]).bfloat16()
    out = Fp8Weight(torch.full((2, 2), 1.5).to(torch.float8_e4m3fn), scale).dequantize(torch.float32)
    assert out.tolist() == [[1.5 * scale.item()] * 2] * 2


def test_tensors_are_read_one_at_a_time(tmp_path: Path) -> None:
    """A consumer that stops early has not read the rest, so a broken payload later does not reach it."""
    checkpoint = write_checkpoint(tmp_path / "model", {}, Layout(fp8=True))
    stream = opened(checkpoint.path).stream()
    name, tensor = next(stream)
    assert name == "model.embed_tokens.weight"
    assert isinstance(tensor, torch.Tensor)
    kinds = {name: type(stored) for name, stored in stream}
    assert kinds[Q_PROJ] is Fp8Weight
    assert kinds["lm_head.weight"] is torch.Tensor


def rewrite(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def set_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return rewrite(lambda tensors: tensors.update({name: tensor}))


def truncate(keep: float) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = path / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * keep)])

    return apply


def write_bytes(name: str, content: bytes) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (path / name).write_bytes(content)

    return apply


def pickled_only(path: Path) -> None:
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")


def header_offsets_past_the_shape(path: Path) -> None:
    file = path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"][1] -= 2
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            rewrite(lambda tensors: tensors.pop(Q_PROJ)),
            rf"tensor {Q_PROJ} is missing, expected shape \[128, 64\]",
        ),
        (
            rewrite(lambda tensors: tensors.pop("mtp.fc.weight")),
            r"tensor mtp.fc.weight is missing, expected shape \[64, 128\]",
        ),
        (
            set_tensor("model.layers.0.self_attn.q_proj.bias", torch.zeros(8)),
            r"tensor model.layers.0.self_attn.q_proj.bias in model.safetensors, shape \[8\], is not part of the model",
        ),
        (
            set_tensor(Q_PROJ, torch.zeros(64, 64).bfloat16()),
            rf"tensor {Q_PROJ} in model.safetensors has shape \[64, 64\], expected \[128, 64\]",
        ),
        (
            set_tensor("model.layers.0.linear_attn.conv1d.weight", torch.zeros(128, 4).bfloat16()),
            r"conv1d.weight in model.safetensors has shape \[128, 4\], expected \[128, 1, 4\]",
        ),
        (set_tensor(Q_PROJ, torch.zeros(128, 64, dtype=torch.int8)), f"tensor {Q_PROJ} in model.safetensors is I8"),
        (
            set_tensor(Q_PROJ, torch.zeros(128, 64).to(torch.float8_e4m3fn)),
            rf"tensor {Q_PROJ}_scale_inv is missing, expected shape \[1, 1\]",
        ),
        (
            set_tensor("lm_head.weight", torch.zeros(211, 64).to(torch.float8_e4m3fn)),
            "tensor lm_head.weight in model.safetensors is F8_E4M3, expected one of BF16, F16, F32",
        ),
        (
            set_tensor(Q_PROJ + "_scale_inv", torch.zeros(1, 1).bfloat16()),
            rf"tensor {Q_PROJ}_scale_inv in model.safetensors, shape \[1, 1\], is not part of the model",
        ),
        (set_tensor("model.language_model.norm.weight", torch.zeros(64).bfloat16()), "is stored twice"),
        (truncate(0.6), r"is truncated: shape \[.*\] ends at byte \d+, the file holds \d+"),
        (truncate(0.001), "is truncated or not a safetensors file"),
        (write_bytes("model.safetensors", b""), "is truncated or not a safetensors file"),
        (write_bytes("model.safetensors", b"\x80\x02}q\x00." + b"x" * 60), "is truncated or not a safetensors file"),
        (write_bytes("model.safetensors", (2).to_bytes(8, "little") + b"[]"), "is not a safetensors file"),
        (header_offsets_past_the_shape, r"tensor model.norm.weight .* \[64\] of BF16 takes 128 bytes, .* gives 126"),
        (pickled_only, "holds no .safetensors file"),
        (write_bytes("model.safetensors.index.json", b"{}"), "is not a safetensors index"),
        (
            write_bytes("model.safetensors.index.json", b'{"weight_map": {"x": "gone.safetensors"}}'),
            "gone.safetensors is missing, though the index lists it",
        ),
        (
            write_bytes("model.safetensors.index.json", b'{"weight_map": {"x": "model.safetensors"}}'),
            "tensor x is missing: model.safetensors.index.json places it in model.safetensors, which lacks it",
        ),
        (
            write_bytes("model.safetensors.index.json", b'{"weight_map": {"x": "../model.safetensors"}}'),
            "names the file '../model.safetensors'",
        ),
    ],
)
def test_refusals_name_the_tensor(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    """vllm#35287: refused before anything is loaded, with the name and both shapes."""
    checkpoint = write_checkpoint(tmp_path / "model")
    damage(checkpoint.path)
    with pytest.raises(CheckpointError, match=message):
        Decoder.load(checkpoint.path)


def test_a_tied_checkpoint_with_a_head_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", {"tie_word_embeddings": True})
    set_tensor("lm_head.weight", torch.zeros(211, 64).bfloat16())(checkpoint.path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight") as caught:
        Decoder.load(checkpoint.path)
    assert "tie_word_embeddings" in caught.value.hint


def test_a_shape_mismatch_of_scales_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", {"hidden_size": 160}, Layout(fp8=True))
    set_tensor(Q_PROJ + "_scale_inv", torch.zeros(1, 1).bfloat16())(checkpoint.path)
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}_scale_inv .* has shape \[1, 1\], expected \[1, 2\]"):
        Decoder.load(checkpoint.path)
