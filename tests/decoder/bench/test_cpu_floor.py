"""Floors are counted from shapes; the counts are those of the checkpoint's own tensors."""

from __future__ import annotations

import math

import pytest
from click.testing import CliRunner
from kernarc.decoder.bench.cpu_floor import Work, draft_work, main, prefill_adds, target_weights, verify_work
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.draft_context import DraftReading

from ...fakes.decoder_checkpoints import RandomCheckpoint, tensor_shapes
from ..conftest import require_compiler


def matrices(checkpoint: RandomCheckpoint, prefix: str) -> int:
    """Weights of every matrix below `prefix`, by transformers' own shapes."""
    shapes = tensor_shapes(checkpoint.config).items()
    return sum(math.prod(shape) for name, shape in shapes if name.startswith(prefix) and len(shape) == 2)


def test_weights_are_those_of_the_checkpoint(checkpoint: RandomCheckpoint) -> None:
    config = ModelConfig.from_dict(checkpoint.config)
    assert target_weights(config, by_token=False) == matrices(checkpoint, "model.layers.")
    head = config.vocab_size * config.hidden_size
    mtp = matrices(checkpoint, "mtp.") - config.hidden_size**2  # fc's other half comes from a table
    assert draft_work(config, depth=0) == Work(mtp + head, 2 * (mtp + head))


def test_a_token_more_reads_its_keys_and_values(base_checkpoint: RandomCheckpoint) -> None:
    config = ModelConfig.from_dict(base_checkpoint.config)
    near, far = verify_work(config, rows=4, depth=10), verify_work(config, rows=4, depth=110)
    assert far.read_bytes - near.read_bytes == 100 * 2 * 2 * 16 * 4  # two kv heads of 16, keys and values, fp32
    assert far.multiply_adds - near.multiply_adds == 100 * 4 * 4 * 16 * 2  # four rows of four heads


def test_the_floor_is_the_larger_quotient() -> None:
    assert Work(5e9, 1e9).floor_ms(gflops=10, gbytes_per_s=10) == 1000
    assert Work(5e8, 1e10).floor_ms(gflops=10, gbytes_per_s=10) == 1000


def test_attention_of_a_prompt_counts_pairs(base_checkpoint: RandomCheckpoint) -> None:
    config = ModelConfig.from_dict(base_checkpoint.config)
    pairs = sum(position + 1 for position in range(50))
    assert prefill_adds(config, 50)["attention"] == pairs * 4 * 16 * 2


def test_positions_left_unfinished_go_without_the_last_mixer(checkpoint: RandomCheckpoint) -> None:
    """20 of 50 rows: no queries, gates and output projection, and no attention among them."""
    config = ModelConfig.from_dict(checkpoint.config)
    whole, less = prefill_adds(config, 50), prefill_adds(config, 50, DraftReading(context=30))
    shapes = tensor_shapes(checkpoint.config)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    names = ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "linear_attn.out_proj.weight")
    left_out = [last + name for name in names]
    weights = sum(math.prod(shapes[name]) for name in left_out if name in shapes)
    assert whole["linear layers"] - less["linear layers"] == 20 * weights
    pairs = sum(position + 1 for position in range(20)) if left_out[0] in shapes else 0
    width = config.num_attention_heads * config.head_dim
    assert whole["attention"] - less["attention"] == pairs * width * 2
    assert prefill_adds(config, 50, DraftReading(50, 50)) == whole


def test_positions_out_of_the_window_cost_the_head_nothing(base_checkpoint: RandomCheckpoint) -> None:
    """20 of 50 rows: no MLP in the last layer, no fc, keys and values."""
    config = ModelConfig.from_dict(base_checkpoint.config)
    skipped, unread = (prefill_adds(config, 50, reading) for reading in (DraftReading(50, 30), DraftReading(30, 30)))
    assert skipped["linear layers"] - unread["linear layers"] == 20 * matrices(base_checkpoint, "model.layers.0.mlp.")
    assert unread["MTP keys and values"] / skipped["MTP keys and values"] == pytest.approx(30 / 50)


@pytest.mark.parametrize("threads", ["1", "2"])
def test_command_line(base_checkpoint: RandomCheckpoint, threads: str) -> None:
    require_compiler()
    result = CliRunner().invoke(main, [str(base_checkpoint.path), "--depths", "5,33", "--threads", threads])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.output.splitlines()[2:]] == ["5:", "prefill", "33:", "prefill"]


def test_without_drafts_only_a_prompt_s_last_position_is_finished(base_checkpoint: RandomCheckpoint) -> None:
    require_compiler()
    arguments = [str(base_checkpoint.path), "--depths", "1000"]
    none, least, usual = (
        CliRunner().invoke(main, [*arguments, *more]).output.split("GFLOP (")[1]
        for more in (["--num-speculative-tokens", "0"], ["--draft-window", "0"], [])
    )
    assert none == least != usual
