"""The command line in this process, and builds whose engine is the stand-in decoder on a checkpoint of known output."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernarc.cli import main

from ...fakes.cycle_checkpoint import write_cycle_checkpoint

FAKE_DECODER = Path(__file__).parents[2] / "fakes" / "fake_decoder"

WriteBuild = Callable[..., str]
Gate = Callable[..., "Finished"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cycle_checkpoint(tmp_path_factory.mktemp("cycle") / "model")


@pytest.fixture
def build(tmp_path: Path, model: Path) -> WriteBuild:
    """Writes a build file whose engine is the stand-in decoder; returns its path."""

    def write(name: str, *extra_args: str, drafts: int = 3, step_ms: float = 12.0) -> str:
        arguments = json.dumps(["--step-ms", str(step_ms), *extra_args])
        path = tmp_path / f"{name}.yaml"
        path.write_text(
            f"engine: kernarc\nnum_speculative_tokens: {drafts}\nmodel: {{path: {model}}}\n"
            f"pythonpath: [{FAKE_DECODER}]\nextra_args: {arguments}\n"
        )
        return str(path)

    return write


@dataclass(frozen=True)
class Finished:
    """What the command left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Gate:
    """Runs the real command line, in this process: importing the reference takes longer than any comparison here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", ["kernarc-gate", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        output = capsys.readouterr()
        return Finished(int(stopped.value.code or 0), output.out, output.err)

    return run
