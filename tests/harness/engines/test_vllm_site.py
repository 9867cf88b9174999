"""What every Python of a vLLM engine reads first: it mends imports beside a CPU torch, and nothing else."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kernarc.harness.config.builds import build_from_config
from kernarc.harness.config.models import BuildConfig, ModelSource
from kernarc.harness.engines.registry import engine_of
from kernarc.harness.engines.vllm_install import SITE_FOLDER

TORCH = """
import types
declared = []
class Library:
    def __init__(self, namespace, kind): self.namespace = namespace
    def define(self, schema): declared.append(f"{self.namespace}::{schema.partition('(')[0]}")
def load_library(path):
    if not LOADS: raise OSError(path)
ops = types.SimpleNamespace(load_library=load_library)
library = types.SimpleNamespace(Library=Library)
"""
ASK = """
import importlib.util, json, sys
seen = {"torch at start": "torch" in sys.modules, "torchaudio": importlib.util.find_spec("torchaudio") is not None}
import torchvision
import torch
print(json.dumps({**seen, "declared": torch.declared}))
"""


@pytest.fixture
def answer(tmp_path: Path) -> Callable[..., dict[str, object]]:
    """Makes a torch and its companions, and asks a fresh Python what it sees of them."""

    def ask(*, cuda: str | None, loads: bool) -> dict[str, object]:
        for package in ("torch", "torchvision", "torchaudio", "torchcodec"):
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / "torch" / "__init__.py").write_text(f"LOADS = {loads}\n{TORCH}")
        (tmp_path / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda!r}\n")
        (tmp_path / "torchvision" / "_C.so").touch()
        environment = {**os.environ, "PYTHONPATH": f"{SITE_FOLDER}{os.pathsep}{tmp_path}"}
        result = subprocess.run(
            [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True
        )
        seen: dict[str, object] = json.loads(result.stdout)
        return seen

    return ask


def test_beside_a_cpu_torch_schemas_are_declared_and_optional_packages_hidden(
    answer: Callable[..., dict[str, object]],
) -> None:
    seen = answer(cuda=None, loads=False)
    assert seen == {
        "torch at start": False,
        "torchaudio": False,
        "declared": ["torchvision::nms", "torchvision::qnms"],
    }


def test_a_torchvision_that_loads_declares_its_own(answer: Callable[..., dict[str, object]]) -> None:
    assert answer(cuda=None, loads=True)["declared"] == []


def test_beside_a_cuda_torch_nothing_is_touched(answer: Callable[..., dict[str, object]]) -> None:
    assert answer(cuda="13.0", loads=False) == {"torch at start": False, "torchaudio": True, "declared": []}


def test_the_command_line_of_stock_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of issue and model page: MTP 3, no prefix cache, one sequence, no tokenizer where there is none."""
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    config = BuildConfig(
        engine="vllm", python="/host/python", num_speculative_tokens=3, device="cuda", pythonpath=("/s",)
    )
    engine = engine_of(build_from_config("vllm", config, ModelSource(path=str(tmp_path))), 66_560)
    command = engine.command(tmp_path, 8111)
    assert command[:5] == ["/host/python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path)]
    pairs = dict(zip(command[3::2], command[4::2], strict=False))
    assert (pairs["--port"], pairs["--max-model-len"], pairs["--max-num-seqs"]) == ("8111", "66560", "1")
    assert {"--no-enable-prefix-caching", "--skip-tokenizer-init"} <= set(command)
    drafts = json.loads(command[command.index("--speculative-config") + 1])
    assert drafts == {"method": "mtp", "num_speculative_tokens": 3}
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.85"
    environment = engine.environment()
    assert environment["PYTHONPATH"] == os.pathsep.join([str(SITE_FOLDER), "/s", "/theirs"])
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    (tmp_path / "tokenizer.json").touch()
    assert "--skip-tokenizer-init" not in engine.command(tmp_path, 8111)


def test_without_drafts_there_is_no_speculative_config(tmp_path: Path) -> None:
    config = BuildConfig(engine="vllm", python="python3", num_speculative_tokens=0, device="cpu")
    engine = engine_of(build_from_config("vllm", config), 500)
    assert "--speculative-config" not in engine.command(tmp_path, 1)
    assert "--gpu-memory-utilization" not in engine.command(tmp_path, 1)
    assert engine.environment()["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_the_libraries_of_a_host_installation_are_read_from_its_metadata(tmp_path: Path) -> None:
    for name, version in (("torch", "2.13.0+cu130"), ("triton", "3.7.1"), ("requests", "2.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    config = BuildConfig(engine="vllm", python=sys.executable, pythonpath=(str(tmp_path),))
    build = build_from_config("host", config, default_model=ModelSource(path="m"))
    assert engine_of(build, 1024).library_versions() == {"torch": "2.13.0+cu130", "triton": "3.7.1"}
