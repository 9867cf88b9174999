"""The text gate on real engines: faults in the numerics, planted in the bundled decoder, are wrong output."""

import json
from pathlib import Path

import pytest

from .conftest import Gate


@pytest.mark.parametrize(
    ("plant", "requests", "max_tokens"),
    [("stale_kv=64", 2, 32), ("wrong_scale=64", 2, 32), ("shifted_position=1", 14, 80)],
    ids=["stale KV", "one scale block", "positions off by one"],
)
def test_the_text_gate_fails_what_structured_weights_forgive(
    gate: Gate, tmp_path: Path, plant: str, requests: int, max_tokens: int
) -> None:
    """All three pass on structured weights, whose logits lie too far apart to be moved. More text shows less faults."""
    candidate = tmp_path / "candidate.yaml"
    candidate.write_text(
        f"engine: kernarc\nnum_speculative_tokens: 3\ndevice: cpu\nextra_args: {json.dumps(['--plant', plant])}\n"
    )
    small = ["--depths", "128", "--requests", str(requests), "--max-tokens", str(max_tokens), "--json"]
    small += ["--config", "text"]
    result = gate("compare", "kernarc", str(candidate), *small, "--out", "run")
    assert result.returncode == 1, result.stderr
    assert json.loads(result.stdout)["output_check"]["verdict"] == "FAIL"
    baseline, _ = json.loads((tmp_path / "run" / "verdict.json").read_text())["output_checks"]
    assert baseline["verdict"] == "PASS"
