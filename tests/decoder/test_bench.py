"""The step bench prints one line a depth, with figures that add up."""

from __future__ import annotations

from click.testing import CliRunner
from kernarc.decoder.bench import main, measure
from kernarc.decoder.generate import Decoder

from .checkpoints import RandomCheckpoint
from .oracle import torch_session


def test_figures_add_up(base_checkpoint: RandomCheckpoint) -> None:
    session = torch_session(Decoder.load(base_checkpoint.path))
    row = measure(session, depth=70, num_drafts=3, steps=10)
    assert row.depth == 70
    assert 1 <= row.tokens_per_step <= 4
    assert row.tpot_ms == row.step_ms / row.tokens_per_step
    assert 0 < row.head_share < row.draft_share + row.verify_share < 1
    assert not vars(session).keys() & {"step", "draft"}  # the stopwatches are gone again


def test_command_line(base_checkpoint: RandomCheckpoint) -> None:
    result = CliRunner().invoke(main, [str(base_checkpoint.path), "--depths", "5,33", "--steps", "10"])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.output.splitlines()[1:]] == ["depth", "5", "33"]


def test_a_broken_checkpoint_is_an_error_message(base_checkpoint: RandomCheckpoint) -> None:
    result = CliRunner().invoke(main, [str(base_checkpoint.path.parent)])
    assert result.exit_code == 1
    assert "config.json does not exist" in result.output
