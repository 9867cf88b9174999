"""The least a step and a prefill can take on this machine: `python -m kernarc.decoder.bench.cpu_floor MODEL`.

Arithmetic and bytes are counted from the shapes, the machine's two speeds are measured here, and the larger quotient is
the floor. Compare with `python -m kernarc.decoder.bench.cpu MODEL`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import click
import torch

from ..checkpoint.config import FULL_ATTENTION, ModelConfig
from ..draft_context import NOTHING, WHOLE_PROMPT, DraftReading, first_position, resolve_reading
from ..native.library import load_library
from .reading_options import reading_options

GDN_CHUNK = 32  # CHUNK of delta_rule.h
WEIGHT_BYTES = 2  # bf16, as checkpoints store them
STATE_BYTES = 4
DRAFT_CACHE_BYTES = 2  # drafts read halves


@dataclass(frozen=True, slots=True)
class Work:
    """Multiply-adds and bytes read of one pass."""

    multiply_adds: float
    read_bytes: float

    def floor_ms(self, gflops: float, gbytes_per_s: float) -> float:
        """Whatever takes longer, arithmetic or reading."""
        return 1e3 * max(2 * self.multiply_adds / (gflops * 1e9), self.read_bytes / (gbytes_per_s * 1e9))

    def __str__(self) -> str:
        return f"{2e-6 * self.multiply_adds:.1f} MFLOP, {self.read_bytes / 1e6:.1f} MB"


def mixer_weights(config: ModelConfig, kind: str) -> tuple[int, int]:
    """Weights of one layer's (input projections, output projection)."""
    hidden = config.hidden_size
    if kind == FULL_ATTENTION:
        width = config.num_attention_heads * config.head_dim
        return hidden * (2 * width + 2 * config.num_key_value_heads * config.head_dim), hidden * width
    inputs = config.conv_dim + config.value_dim + 2 * config.linear_num_value_heads
    return hidden * inputs, hidden * config.value_dim


def target_weights(config: ModelConfig, *, by_token: bool) -> int:
    """Weights that one row of the target meets, head aside. by_token: the first layer's inputs come from a table."""
    mlp = 3 * config.hidden_size * config.intermediate_size
    mixers = [mixer_weights(config, kind) for kind in config.layer_types]
    return sum(sum(pair) + mlp for pair in mixers) - (mixers[0][0] if by_token else 0)


def attention_adds(config: ModelConfig, pairs: float) -> float:
    """Multiply-adds of one attention layer for so many (query, key) pairs."""
    return pairs * config.num_attention_heads * config.head_dim * 2


def verify_work(config: ModelConfig, rows: int, depth: int) -> Work:
    """One pass of `rows` rows after `depth` tokens."""
    weights = target_weights(config, by_token=True) + config.hidden_size * config.vocab_size
    attentions = config.layer_types.count(FULL_ATTENTION)
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    states = state * (config.num_hidden_layers - attentions)
    keys = attentions * 2 * config.num_key_value_heads * config.head_dim * depth
    adds = rows * (weights + 3 * states) + attentions * attention_adds(config, rows * depth)
    return Work(adds, weights * WEIGHT_BYTES + (keys + 2 * states) * STATE_BYTES)


def draft_work(config: ModelConfig, depth: int) -> Work:
    """One pass of the MTP head and of the head after it; the embedding's half of fc comes from a table."""
    hidden = config.hidden_size
    weights = sum(mixer_weights(config, FULL_ATTENTION)) + 3 * hidden * config.intermediate_size
    weights += hidden * hidden + hidden * config.vocab_size
    keys = 2 * config.num_key_value_heads * config.head_dim * depth
    return Work(weights + attention_adds(config, depth), weights * WEIGHT_BYTES + keys * DRAFT_CACHE_BYTES)


def skipped_adds(config: ModelConfig, rows: int) -> tuple[int, float]:
    """What a prompt saves where its first `rows` go without the last mixer: of (linear layers, attention)."""
    inputs, outputs = mixer_weights(config, config.layer_types[-1])
    if config.layer_types[-1] != FULL_ATTENTION:
        return rows * outputs, 0.0  # its state takes all inputs
    keys_values = config.hidden_size * 2 * config.num_key_value_heads * config.head_dim
    queries = inputs - keys_values if config.num_hidden_layers > 1 else 0  # a first layer's come from a table
    return rows * (queries + outputs), attention_adds(config, rows * (rows + 1) / 2)


def prefill_adds(config: ModelConfig, depth: int, reading: DraftReading = WHOLE_PROMPT) -> dict[str, float]:
    """Multiply-adds of a prompt by part, where the MTP head reads so much of it."""
    unread = first_position(depth, reading.window)
    linear, attention = skipped_adds(config, max(unread, first_position(depth, reading.context)))
    linear += unread * 3 * config.hidden_size * config.intermediate_size
    attentions = config.layer_types.count(FULL_ATTENTION)
    key, value, chunk = config.linear_key_head_dim, config.linear_value_head_dim, GDN_CHUNK
    # a row of a chunk: two products with keys and the system below the diagonal, S read twice and written once
    delta = chunk * key + chunk * value + 3 * key * value
    parts = {
        "linear layers": float(depth * target_weights(config, by_token=True) - linear),
        "attention": attentions * attention_adds(config, depth * (depth + 1) / 2) - attention,
        "delta rule": float(depth * config.linear_num_value_heads * delta * (config.num_hidden_layers - attentions)),
    }
    if config.has_mtp:
        hidden = config.hidden_size
        parts["MTP keys and values"] = float(
            (depth - unread) * (hidden * hidden + hidden * 2 * config.num_key_value_heads * config.head_dim)
        )
    return parts


def torch_gflops(threads: int) -> float:
    """PyTorch's fp32 matrix product, 4096 rows of 256 by 1024 outputs."""
    torch.set_num_threads(threads)
    rows, matrix, best = torch.randn(4096, 256), torch.randn(256, 1024), float("inf")
    for _ in range(30):
        start = time.perf_counter()
        rows @ matrix
        best = min(best, time.perf_counter() - start)
    return 2e-9 * rows.shape[0] * matrix.numel() / best


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.option("--depths", default="128,1024,4096", show_default=True)
@click.option("--num-speculative-tokens", "drafts", default=3, show_default=True, type=click.IntRange(0, 8))
@reading_options
@click.option("--threads", default=torch.get_num_threads(), show_default=True, type=click.IntRange(1))
def main(
    model: str, depths: str, drafts: int, draft_window: int | None, draft_context: int | None, threads: int
) -> None:
    """Floors of MODEL on this CPU."""
    config, library = ModelConfig.from_directory(model), load_library()
    reading = resolve_reading(draft_window, draft_context, "cpu", config) if drafts else NOTHING
    one, together = library.kernarc_measure_arithmetic(1), library.kernarc_measure_arithmetic(threads)
    click.echo(f"fp32 arithmetic: {one:.0f} GFLOP/s on 1 thread, {together:.0f} on {threads}")
    click.echo(f"torch {torch.__version__} matmul: {torch_gflops(1):.0f} and {torch_gflops(threads):.0f} GFLOP/s")
    for depth in map(int, depths.split(",")):
        seen = depth - first_position(depth, reading.window)
        verify, draft = verify_work(config, drafts + 1, depth), draft_work(config, seen)
        values = torch.ones(int(max(verify.read_bytes, draft.read_bytes)) // 4)
        speed = library.kernarc_measure_reading(values.data_ptr(), values.numel())
        floors = verify.floor_ms(one, speed), drafts * draft.floor_ms(one, speed)
        click.echo(
            f"{depth:>6}: step {sum(floors):.3f} ms on 1 thread = verify {floors[0]:.3f} ({verify}) + {drafts} drafts "
            f"{floors[1]:.3f} ({draft} each) at {speed:.0f} GB/s"
        )
        parts = prefill_adds(config, depth, reading)
        listed = ", ".join(f"{name} {2e-9 * adds:.2f}" for name, adds in parts.items())
        gflop = 2e-9 * sum(parts.values())
        click.echo(
            f"{'':>6}  prefill {1e3 * gflop / together:.1f} ms on {threads} threads = {gflop:.1f} GFLOP ({listed})"
        )


if __name__ == "__main__":
    main()
