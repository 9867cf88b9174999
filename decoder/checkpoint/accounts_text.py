"""`model info` for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .accounts import PartAccount, StepFloor
from .config import FULL_ATTENTION, ModelConfig


def accounts_json(
    path: str,
    config: ModelConfig,
    accounts: Sequence[PartAccount],
    floors: Sequence[StepFloor],
    tb_per_s: float | None,
) -> dict[str, Any]:
    """Exact numbers, bytes everywhere."""
    shapes = asdict(config) | {"eos_token_ids": sorted(config.eos_token_ids)}
    rows = []
    for floor in floors:
        row = asdict(floor) | {"total": floor.total, "total_eager": floor.total_eager}
        rows.append(row if tb_per_s is None else row | {"floor_ms": floor.floor_ms(tb_per_s)})
    return {
        "path": path,
        "config": shapes,
        "parts": [asdict(account) for account in accounts],
        "n_parameters": sum(account.n_parameters for account in accounts),
        "n_bytes": sum(account.n_bytes for account in accounts),
        "tb_per_s": tb_per_s,
        "step_floors": rows,
    }


def accounts_text(
    path: str,
    config: ModelConfig,
    accounts: Sequence[PartAccount],
    floors: Sequence[StepFloor],
    tb_per_s: float | None,
) -> str:
    """The same in three blocks: shapes, parts, floors."""
    return "\n".join([path, *_shapes(config), "", *_parts(accounts), "", *_floors(floors, tb_per_s)])


def _shapes(config: ModelConfig) -> list[str]:
    attention = sum(kind == FULL_ATTENTION for kind in config.layer_types)
    return [
        f"  {config.num_hidden_layers} layers: {config.num_hidden_layers - attention} gated delta net, "
        f"{attention} full attention, {'one MTP layer' if config.has_mtp else 'no MTP layer'}",
        f"  hidden {config.hidden_size}, MLP {config.intermediate_size}, vocabulary {config.vocab_size}"
        f"{' (tied head)' if config.tie_word_embeddings else ''}, window {config.max_position_embeddings}",
        f"  attention: {config.num_attention_heads} query and {config.num_key_value_heads} kv heads of "
        f"{config.head_dim}, {config.rotary_dim} rotated",
        f"  gated delta net: {config.linear_num_value_heads} value heads of {config.linear_value_head_dim}, "
        f"{config.linear_num_key_heads} key heads of {config.linear_key_head_dim}, "
        f"convolution over {config.linear_conv_kernel_dim}",
    ]


def _parts(accounts: Sequence[PartAccount]) -> list[str]:
    rows = [("part", "tensors", "parameters", "bytes", "stored as")]
    rows += [(a.part, str(a.n_tensors), f"{a.n_parameters:,}", f"{a.n_bytes:,}", " ".join(a.dtypes)) for a in accounts]
    totals = [sum(getattr(a, name) for a in accounts) for name in ("n_tensors", "n_parameters", "n_bytes")]
    return _table([*rows, ("total", str(totals[0]), f"{totals[1]:,}", f"{totals[2]:,}", "")])


def _floors(floors: Sequence[StepFloor], tb_per_s: float | None) -> list[str]:
    head: tuple[str, ...] = ("depth", "weights", "heads", "MTP", "GDN state", "KV", "total MB", "state every row")
    rows = [head if tb_per_s is None else (*head, f"ms at {tb_per_s:g} TB/s")]
    for floor in floors:
        sizes = (
            floor.main_weights,
            floor.heads,
            floor.mtp_weights,
            floor.gdn_state,
            floor.kv_cache,
            floor.total,
            floor.total_eager,
        )
        row = (f"{floor.depth:,}", *(f"{size / 1e6:,.1f}" for size in sizes))
        rows.append(row if tb_per_s is None else (*row, f"{floor.floor_ms(tb_per_s):.3g}"))
    drafts = floors[0].num_drafts if floors else 0
    return [f"Byte floor of a step of {drafts} drafts and a verify of {drafts + 1} rows, MB", *_table(rows)]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(["", row[0].ljust(widths[0]), *numbers]).rstrip())
    return lines
