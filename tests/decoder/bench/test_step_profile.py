"""A step's kernels fall into the six parts that the page draws, whatever the order of the calls says they are."""

import json
from pathlib import Path

import pytest
import torch
from kernarc.decoder.bench.step_profile import NotedProducts, parts_ms, write_profile
from kernarc.decoder.cuda.kernels.packing import pack_bf16, unpack
from kernarc.decoder.cuda.kernels.products import PlainProducts
from kernarc.decoder.errors import DecoderError

CALLS = ["weights", "draft heads", "weights", "weights", "verify head"]
KERNELS = [
    ("linear", 10.0),
    ("rms_norm_kernel", 1.0),
    ("linear", 30.0),
    ("gdn_prepare_kernel", 2.0),
    ("recur_kernel", 3.0),
    ("linear", 100.0),
    ("split_kernel", 5.0),
    ("combine_kernel", 6.0),
    ("rope_qk_kernel", 7.0),
    ("linear", 200.0),
    ("linear", 500.0),
    ("decide_kernel", 8.0),
    ("accept_kernel", 0.5),
]


def test_kernels_fall_into_their_parts() -> None:
    parts = parts_ms(KERNELS * 4, CALLS, steps=4)
    assert list(parts.values()) == pytest.approx([0.31, 0.508, 0.03, 0.005, 0.018, 0.0015])
    assert sum(parts.values()) == pytest.approx(sum(micros for _, micros in KERNELS) / 1e3)


def test_lost_events_are_said() -> None:
    with pytest.raises(DecoderError, match="saw 5 kernels named linear…, expected 2 steps of 5"):
        parts_ms(KERNELS, CALLS, steps=2)


def test_calls_are_told_apart_by_what_they_read() -> None:
    head, packed = (pack_bf16(torch.randn(32, 64)) for _ in range(2))
    noted = NotedProducts(PlainProducts(), head)
    x, out, ids = torch.randn(1, 64), torch.empty(1, 32), torch.empty(1, dtype=torch.int64)
    for _ in range(3):
        noted.store(x, packed, out)
        noted.argmax(x, head, ids)
        noted.store(x, head, out)
    assert noted.of_a_step(3) == ["weights", "draft heads", "verify head"]
    torch.testing.assert_close(out, x @ unpack(head).t())  # and they are computed
    noted.store(x, packed, out)
    with pytest.raises(DecoderError, match="10 products"):
        noted.of_a_step(3)


def test_a_profile_is_added_to_the_others(tmp_path: Path) -> None:
    path = tmp_path / "step_profile.json"
    write_profile(path, "one", {8192: {"weights": 6.5}, 128: {"weights": 6.25, "rest": 0.5}})
    write_profile(path, "two", {128: {"weights": 7.0}})
    write_profile(path, "two", {128: {"weights": 8.0}})
    builds = json.loads(path.read_text())["builds"]
    assert builds["two"] == [{"depth": 128, "parts": [{"name": "weights", "ms": 8.0}]}]
    assert [entry["depth"] for entry in builds["one"]] == [128, 8192]
    path.write_text("[]")
    with pytest.raises(DecoderError, match="is no step profile"):
        write_profile(path, "one", {})
