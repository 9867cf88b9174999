"""The step bench prints one line a depth and path, with figures that add up."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from kernarc.decoder.bench.cpu import main, measure, render
from kernarc.decoder.generate import Decoder
from kernarc.decoder.native.build import find_compiler

from ...fakes.decoder_checkpoints import RandomCheckpoint
from ...fakes.draft_oracle import cpu_session
from ..conftest import require_compiler


def test_figures_add_up(base_checkpoint: RandomCheckpoint, native: bool) -> None:
    session = cpu_session(Decoder.load(base_checkpoint.path, native=native))
    row = measure(session, 211, depth=70, num_drafts=3, steps=10)
    assert row.depth == 70
    assert 1 <= row.tokens_per_step <= 4
    assert row.tpot_ms == row.step_ms / row.tokens_per_step
    assert 0 < row.draft_share < 1
    assert not vars(session).keys() & {"step", "draft"}  # the stopwatches are gone again


def test_both_paths_and_their_ratio(base_checkpoint: RandomCheckpoint) -> None:
    require_compiler()
    result = CliRunner().invoke(main, [str(base_checkpoint.path), "--depths", "5,33", "--steps", "10"])
    assert result.exit_code == 0, result.output
    lines = [line.split()[:2] for line in result.output.splitlines()[1:]]
    paths = ["C++", "PyTorch", "ratio"]
    assert lines == [["depth", "path"], *(["5", path] for path in paths), *(["33", path] for path in paths)]


def test_the_ratio_is_plain_over_native(base_checkpoint: RandomCheckpoint) -> None:
    require_compiler()
    rows = [
        measure(cpu_session(Decoder.load(base_checkpoint.path, native=native)), 211, 9, 3, 10)
        for native in (True, False)
    ]
    assert render(rows, 3).splitlines()[-1].split()[-2] == f"x{rows[1].step_ms / rows[0].step_ms:.1f}"


def test_one_path_alone(base_checkpoint: RandomCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [str(base_checkpoint.path), "--depths", "5", "--steps", "10"]
    result = CliRunner().invoke(main, [*arguments, "--path", "plain"])
    assert [line.split()[1] for line in result.output.splitlines()[1:]] == ["path", "PyTorch"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("kernarc.decoder.native.library.load_library", find_compiler)
    result = CliRunner().invoke(main, arguments)
    assert "no C++ path: CXX names 'no-such-compiler'" in result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines()[1:]] == ["path", "PyTorch"]
    assert CliRunner().invoke(main, [*arguments, "--path", "native"]).exit_code == 1


def test_a_broken_checkpoint_is_an_error_message(base_checkpoint: RandomCheckpoint) -> None:
    result = CliRunner().invoke(main, [str(base_checkpoint.path.parent)])
    assert result.exit_code == 1
    assert "config.json does not exist" in result.output
