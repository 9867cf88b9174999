"""Every finding names its next step where there is one to take."""

import json
import shutil
import socket
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernarc.harness import doctor
from kernarc.harness.config.checkpoints import checkpoint_size
from kernarc.harness.doctor import Finding, State, examine
from kernarc.harness.errors import ConfigError


def findings(model: Path | None = None) -> dict[str, Finding]:
    return {finding.name.partition(" /")[0]: finding for finding in examine(model)}


def write_checkpoint(folder: Path, weights: int) -> Path:
    """A checkpoint of one BF16 tensor, as far as headers go; the data is a hole in the file."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    tensor = {"dtype": "BF16", "shape": [weights // 8, 8], "data_offsets": [0, 2 * weights]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * weights)
    return folder


def test_this_machine_can_measure() -> None:
    found = findings()
    assert {"processor", "other load", "clock", "GPU", "memory", "vLLM", "loopback", "git"} <= set(found)
    assert found["clock"].state is State.FINE
    assert found["loopback"].state is State.FINE


def test_sizes_come_from_the_headers(tmp_path: Path) -> None:
    size = checkpoint_size(write_checkpoint(tmp_path / "m", 8000))
    assert (size.weights, size.stored_bytes) == (8000, 16000)


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, struct.pack("<Q", 2**60), struct.pack("<Q", 3) + b"not"])
def test_a_broken_checkpoint_is_named(content: bytes, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", 80)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file"):
        checkpoint_size(folder)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no safetensors file"):
        checkpoint_size(tmp_path)


def test_a_model_that_fits_and_one_that_does_not(tmp_path: Path) -> None:
    small = findings(write_checkpoint(tmp_path / "small", 8000))["model"]
    assert small.state is State.FINE
    assert "8 thousand weights" in small.detail
    large = findings(write_checkpoint(tmp_path / "large", 10**12))["model"]
    assert large.state is State.BAD
    assert "machine with more memory" in large.next_step


def test_no_vllm_says_how_to_add_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_installation", lambda: None)
    vllm = findings()["vLLM"]
    assert vllm.state is State.NOTE
    assert "kernarc-gate engines install vllm" in vllm.next_step


def test_a_small_disk_says_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    disk = findings()["disk for runs"]
    assert disk.state is State.NOTE
    assert "0.5 GiB are wanted" in disk.next_step


def test_other_load_names_who_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BUSY_WINDOW_S", 0.05)
    monkeypatch.setattr(doctor.psutil, "cpu_percent", lambda _: 80.0)
    load = findings()["other load"]
    assert load.state is State.NOTE
    assert "80% of the processor is busy" in load.detail


def test_no_loopback_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert findings()["loopback"].state is State.BAD


def test_other_gpu_processes_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="H200", driver="580", memory_bytes=150 * 2**30, free_bytes=lambda: 2**30)
    reading = SimpleNamespace(gpu_foreign_processes=("pid 9",), gpu_throttle_reasons=("hw_slowdown",))
    monkeypatch.setattr(doctor.Gpu, "open", lambda: gpu)
    monkeypatch.setattr(doctor, "sample", lambda _: reading)
    found = findings()
    assert found["GPU"].detail == "H200, 150 GiB, driver 580"
    assert found["other GPU processes"].state is State.BAD
    assert "hw_slowdown" in found["GPU clocks"].detail
