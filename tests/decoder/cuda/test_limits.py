"""What a card cannot do is said before a weight is read."""

import dataclasses
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.checkpoint.shapes import read_shape
from kernarc.decoder.checkpoint.weights import Checkpoint
from kernarc.decoder.cuda.kernels.linear_shape import shape_of
from kernarc.decoder.cuda.kernels.packing import PackedLinear
from kernarc.decoder.cuda.limits import (
    check_card,
    check_drafts,
    check_memory,
    check_shapes,
    most_drafts,
    required_bytes,
)
from kernarc.decoder.cuda.session import warm_up_length
from kernarc.decoder.errors import DecoderError

from ...fakes.decoder_checkpoints import Layout, write_checkpoint

CARD = torch.device("cuda", 0)
Stored = namedtuple("Stored", "shape dtype")


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    write_checkpoint(tmp_path / "model", {"vocab_size": 208, "eos_token_id": 207}, Layout(fp8=True))
    return ModelConfig.from_directory(tmp_path / "model")


def test_no_card_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DecoderError, match="no CUDA card is available"):
        check_card(CARD)


def test_an_old_card_is_named_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(DecoderError, match=r"Tesla T4 has compute capability 7\.5, the kernels need 8\.0"):
        check_card(CARD)


def test_a_card_with_too_little_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = [99 * 1024]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    properties = lambda device: SimpleNamespace(shared_memory_per_block_optin=shared[0])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    with pytest.raises(DecoderError, match="L40S has 99 KiB of shared memory a block, the kernels need 163"):
        check_card(CARD)
    shared[0] = 163 * 1024
    check_card(CARD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 24}, "head_dim 24, expected a power of two"),
        ({"linear_value_head_dim": 8}, "linear_value_head_dim 8"),
        ({"hidden_size": 48}, "hidden_size 48, expected a multiple of 32"),
        ({"vocab_size": 211}, "vocab_size 211, expected a multiple of 16"),
    ],
)
def test_an_unsupported_shape_is_named(changes: dict[str, int], message: str, config: ModelConfig) -> None:
    check_shapes(config)
    with pytest.raises(DecoderError, match=message):
        check_shapes(dataclasses.replace(config, **changes))


@pytest.mark.parametrize(
    ("name", "capability", "processors", "drafts"), [("A100", (8, 0), 108, 7), ("H200", (9, 0), 132, 8)]
)
def test_drafts_that_the_card_holds(
    name: str, capability: tuple[int, int], processors: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A100: 9 rows of the 27B's 17,408 columns are more than 163 KiB of shared memory take beside a ring of weights."""
    config = ModelConfig.from_dict(read_shape("27b"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert most_drafts(config, CARD) == drafts
    check_drafts(drafts, config, CARD)
    if drafts < 8:
        with pytest.raises(DecoderError, match="verifies 9 rows, more than this model's widest product holds on A100"):
            check_drafts(8, config, CARD)


def test_the_head_that_drafts_must_fit_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fc reads two hidden states a row: more columns of x than any layer's product where the MLP is narrow."""
    narrow = {"hidden_size": 8192, "intermediate_size": 12_288}
    config = dataclasses.replace(ModelConfig.from_dict(read_shape("27b")), **narrow)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=108))
    fc = PackedLinear(torch.empty(0), torch.empty(1), None, n=8192, k=2 * 8192)
    rows = most_drafts(config, CARD) + 1
    assert shape_of(fc, rows, 108, 80).m == rows
    with pytest.raises(DecoderError, match="use fewer draft tokens"):
        shape_of(fc, rows + 1, 108, 80)


def test_memory_is_counted_from_the_headers(
    tmp_path: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(tmp_path / "model", config)
    parts = required_bytes(checkpoint, config, 1000, with_mtp=True)
    on_disk = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert 0.8 * on_disk < parts["weights"] < on_disk
    # one attention layer and the MTP layer: keys and values of 2 heads of 16 in fp16; 4 rotary entries of bf16
    assert parts["keys and values"] == 1032 * (2 * 2 * 2 * 16 * 2 + 4 * 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    with pytest.raises(DecoderError, match=r"the card has 1\.0 GiB free, this model needs 2\.0 at a context of 1,000"):
        check_memory(checkpoint, config, 1000, CARD, with_mtp=True)


def test_quantised_on_load_halves_the_linears_and_a_draft_head_is_counted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "bf16", {"vocab_size": 208, "eos_token_id": 207})
    config = ModelConfig.from_directory(tmp_path / "bf16")
    checkpoint = Checkpoint(tmp_path / "bf16", config)
    as_stored, quantised = (
        required_bytes(checkpoint, config, 1000, with_mtp=True, draft_rows=48, quantize=quantize)
        for quantize in (False, True)
    )
    layer_linears = 64 * 96 * 3  # every layer's MLP; attention and delta net come on top
    assert as_stored["weights"] - quantised["weights"] > 5 * layer_linears
    assert as_stored["reduced draft head"] == 48 * 64


def test_the_published_model_fits_an_80_gib_card() -> None:
    config = ModelConfig.from_dict(read_shape("27b"))
    with_kv = 17 * (65_536 + 32) * 4096  # 16 attention layers and the MTP layer, 4,096 bytes a token each

    headers = SimpleNamespace(tensors={"model.all": Stored((30_870_000_000,), "F8_E4M3")})
    parts = required_bytes(headers, config, 65_536, with_mtp=True)  # type: ignore[arg-type]
    assert abs(parts["keys and values"] - with_kv) < 0.01 * with_kv
    assert sum(parts.values()) < 79 * 2**30


def test_a_long_window_needs_room_for_a_whole_pass_of_a_prompt() -> None:
    """With a small vocabulary that takes more than packing the head; beyond a pass it grows no more."""
    shape = dataclasses.replace(ModelConfig.from_dict(read_shape("27b")), vocab_size=16_000)
    headers = SimpleNamespace(tensors={})
    short, whole, longer = (
        required_bytes(headers, shape, window, with_mtp=True)["packing and prefill"]  # type: ignore[arg-type]
        for window in (1024, 32_768, 131_072)
    )
    gate_and_up = 2 * 2 * shape.intermediate_size
    assert whole - short > (32_768 - 1024) * gate_and_up
    assert longer == whole


def test_warm_up_takes_every_path_that_the_window_allows() -> None:
    assert [warm_up_length(window) for window in (65_536, 24_581, 8_200, 100, 2)] == [
        32773,
        16389,
        8197,
        5,
        1,
    ]
