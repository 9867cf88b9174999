"""`model info`: the published model's bytes and floors, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from kernarc.decoder.checkpoint.accounts import PartAccount, part_accounts, step_floor
from kernarc.decoder.checkpoint.accounts_text import accounts_json, accounts_text
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.checkpoint.layout import checkpoint_tensors
from kernarc.decoder.checkpoint.safetensors_files import StoredTensor
from kernarc.decoder.checkpoint.shapes import NAMED_SHAPES
from kernarc.decoder.checkpoint.synthetic import TokenCycle, structured_tensors

CONFIG = ModelConfig.from_dict(NAMED_SHAPES["27b"])


@pytest.fixture(scope="module")
def accounts() -> Sequence[PartAccount]:
    """Of the 27B FP8 checkpoint, as its headers would say."""
    cycle = TokenCycle(*(np.arange(248320) for _ in range(3)))
    stored = {
        tensor.name: StoredTensor(Path(tensor.file), tensor.name, tensor.dtype, tensor.shape, 0, tensor.n_bytes)
        for tensor in structured_tensors(CONFIG, cycle, seed=0, fp8=True)
    }
    return part_accounts(checkpoint_tensors(CONFIG), stored)


def test_parts_of_the_published_model(accounts: Sequence[PartAccount]) -> None:
    by_part = {account.part: account for account in accounts}
    assert by_part["head"].n_bytes == pytest.approx(2.543e9, rel=1e-3)
    assert by_part["mtp layer"].n_bytes == pytest.approx(0.372e9, rel=1e-2)
    assert by_part["mtp fc"].n_bytes == pytest.approx(0.105e9, rel=1e-2)
    assert by_part["mlp"].dtypes == ("BF16", "F8_E4M3")
    assert sum(account.n_parameters for account in accounts) == pytest.approx(27.3e9, rel=0.01)


# MODEL section 4, "as shipped", at 4.8 TB/s: 7.7 / 7.8 / 8.2 / 8.7 ms; 2.04 TB/s: 18.0 / 20.5
@pytest.mark.parametrize(
    ("depth", "at_h200", "at_a100"), [(128, 7.7, 18.0), (8192, 7.8, None), (32768, 8.2, None), (65536, 8.7, 20.5)]
)
def test_floors_of_the_published_model(
    accounts: Sequence[PartAccount], depth: int, at_h200: float, at_a100: float | None
) -> None:
    floor = step_floor(CONFIG, accounts, depth=depth, num_drafts=3)
    assert floor.total_eager / 4.8e9 == pytest.approx(at_h200, abs=0.06)
    if at_a100 is not None:
        assert floor.total_eager / 2.04e9 == pytest.approx(at_a100, abs=0.06)
    assert floor.gdn_state == pytest.approx(2 * 151e6, abs=1e6)
    assert floor.gdn_state_eager == pytest.approx(755e6, abs=1e6)


# MODEL section 4, "bf16 verify head, 40,960-row draft head, lazy commit"
@pytest.mark.parametrize(
    ("depth", "at_h200", "at_a100"), [(128, 6.2, 14.7), (8192, 6.4, None), (32768, 6.8, None), (65536, 7.3, 17.2)]
)
def test_floors_with_a_reduced_draft_head(
    accounts: Sequence[PartAccount], depth: int, at_h200: float, at_a100: float | None
) -> None:
    floor = step_floor(CONFIG, accounts, depth=depth, num_drafts=3, draft_rows=40960)
    assert floor.total / 4.8e9 == pytest.approx(at_h200, abs=0.06)
    if at_a100 is not None:
        assert floor.total / 2.04e9 == pytest.approx(at_a100, abs=0.06)


def test_keys_and_values(accounts: Sequence[PartAccount]) -> None:
    floors = [step_floor(CONFIG, accounts, depth=depth, num_drafts=3) for depth in (0, 1)]
    assert floors[1].kv_cache - floors[0].kv_cache == 65536 + 3 * 4096
    no_drafts = step_floor(CONFIG, accounts, depth=1, num_drafts=0)
    assert (no_drafts.kv_cache, no_drafts.mtp_weights) == (65536, 0)


def test_text_and_json_agree(accounts: Sequence[PartAccount]) -> None:
    floors = [step_floor(CONFIG, accounts, depth=128, num_drafts=3)]
    as_json = accounts_json("m", CONFIG, accounts, floors, 4.8)
    text = accounts_text("m", CONFIG, accounts, floors, 4.8)
    assert f"{as_json['n_bytes']:,}" in text
    assert "64 layers: 48 gated delta net, 16 full attention, one MTP layer" in text
    assert as_json["step_floors"][0]["floor_ms"] == pytest.approx(floors[0].total / 4.8e9)
    assert f"{floors[0].total / 1e6:,.1f}" in text
