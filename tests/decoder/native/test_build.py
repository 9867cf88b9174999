"""Compiled once and shared; where it cannot be compiled, plain PyTorch and one line that says why."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from kernarc.cli import cli
from kernarc.decoder.cpu.session import TorchSession
from kernarc.decoder.generate import Decoder
from kernarc.decoder.native import build, library
from kernarc.decoder.native.build import NativeUnavailableError, library_path
from kernarc.decoder.native.library import native_library
from kernarc.decoder.native.session import NativeSession

from ...fakes.decoder_checkpoints import RandomCheckpoint
from ..conftest import require_compiler


@pytest.fixture
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder of our own, nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


def fake_compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `script` the only compiler there is."""
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text("#!/bin/sh\n" + script)
    compiler.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.usefixtures("_empty_cache")
def test_two_processes_that_compile_at_once_share_one_library(tmp_path: Path) -> None:
    require_compiler()
    code = "from kernarc.decoder.native.library import load_library as l; print(l()._name, l().kernarc_max_rows())"
    command = [sys.executable, "-c", code]
    racing = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=200)[0] for process in racing]
    assert [process.returncode for process in racing] == [0, 0]
    assert printed[0] == printed[1]
    assert os.listdir(tmp_path / "cache/kernarc/native") == [library_path().name]


@pytest.mark.usefixtures("_empty_cache")
def test_another_source_or_flag_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_compiler(
        tmp_path / "bin",
        'case "$*" in *--version) echo 1;; *) while [ "$1" != -o ]; do shift; done; echo x > "$2";; esac\n',
        monkeypatch,
    )
    first = library_path()
    assert first.read_text() == "x\n"
    assert library_path() == first
    monkeypatch.setattr(build, "FLAGS", ("-O1",))
    assert library_path() != first


@pytest.mark.usefixtures("_empty_cache")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "there is no C++ compiler on PATH"),
        ('echo "engine.cpp:1: error: no such thing" >&2\nexit 1\n', "failed with exit code 1"),
        (
            'case "$*" in *--version) exit 0;; esac\necho "engine.cpp:7: error: bad" >&2\nexit 4\n',
            "exit code 4: engine.cpp:7: error: bad",
        ),
        (
            'case "$*" in *--version) exit 0;; esac\nwhile [ "$1" != -o ]; do shift; done; echo no > "$2"\n',
            "cannot be loaded",
        ),
    ],
    ids=["none", "no-version", "does-not-compile", "not-a-library"],
)
def test_without_a_library_it_decodes_in_plain_pytorch_and_says_so_once(
    base_checkpoint: RandomCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str | None,
    said: str,
) -> None:
    monkeypatch.delenv(library.PATH_VARIABLE, raising=False)
    if script is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        fake_compiler(tmp_path / "bin", script, monkeypatch)
    with caplog.at_level(logging.WARNING, "kernarc.decoder"):
        assert isinstance(Decoder.load(base_checkpoint.path, device="cpu").session, TorchSession)
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith("decoding in plain PyTorch, several times slower: ")
    assert said in caplog.messages[0]
    assert len(caplog.messages[0].splitlines()) == 1
    with pytest.raises(NativeUnavailableError, match=re.escape(said)):
        Decoder.load(base_checkpoint.path, device="cpu", native=True)
    assert not list(tmp_path.glob("cache/kernarc/native/tmp*")), "what failed to compile is not left lying about"


def test_the_path_can_be_chosen(base_checkpoint: RandomCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    for choice, kind in (("plain", TorchSession), ("native", NativeSession), ("", NativeSession)):
        monkeypatch.setenv(library.PATH_VARIABLE, choice)
        assert isinstance(Decoder.load(base_checkpoint.path, device="cpu").session, kind)
    monkeypatch.setenv(library.PATH_VARIABLE, "fast")
    with pytest.raises(NativeUnavailableError, match="KERNARC_CPU_PATH is 'fast', expected native, plain or nothing"):
        Decoder.load(base_checkpoint.path, device="cpu")
    assert native_library(False) is None


def test_doctor_says_which_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    monkeypatch.delenv(library.PATH_VARIABLE, raising=False)

    def finding() -> dict[str, str]:
        result = CliRunner().invoke(cli, ["doctor", "--json"])
        return next(row for row in json.loads(result.stdout)["findings"] if row["name"] == "decoder on the CPU")

    assert finding()["state"] == "fine"
    assert finding()["detail"].startswith("C++, compiled by ")
    monkeypatch.setenv(library.PATH_VARIABLE, "plain")
    assert finding()["detail"] == "plain PyTorch, because KERNARC_CPU_PATH is plain"
    monkeypatch.delenv(library.PATH_VARIABLE)
    monkeypatch.setattr(library, "load_library", build.library_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert finding()["detail"].startswith("plain PyTorch, several times slower: CXX names 'no-such-compiler'")
    assert finding()["next_step"]


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(NativeUnavailableError, match="CXX names 'no-such-compiler'"):
        library_path()
