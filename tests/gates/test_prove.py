"""What the real proofs conclude from outcomes; the proofs themselves take minutes and run engines."""

from pathlib import Path
from typing import Any

import pytest
from kernarc.gates import prove
from kernarc.gates.config import GateConfig
from kernarc.harness.config.yaml_files import load, parse


def outcome(low: float | None, high: float | None, verdict: str = "INCONCLUSIVE", **effects: float) -> dict[str, Any]:
    middle = 0.0 if low is None or high is None else (low + high) / 2
    effect = {"step_effect": middle, "acceptance_effect": 0.0, **effects}
    depth = {"depth": 128, "point_estimate": middle, "low": low, "high": high, "launches": 5, **effect}
    return {"verdict": verdict, "depths": [depth], "output_check": {"verdict": "PASS"}, "next_step": ""}


def test_a_with_a_runs_together_count_the_intervals_that_hold_zero() -> None:
    """Half widths 2, 2 and 1 %; estimates 0, +1 and +2 %: mean 1 %, standard deviation 1 %; the last misses 0."""
    (line,) = prove._together([outcome(-0.02, 0.02), outcome(-0.01, 0.03), outcome(0.01, 0.03), outcome(None, None)])
    assert line == (
        "A/A at depth 128: 2 of 3 intervals hold 0, their half width is 2.0% (median); "
        "estimates +1.00% on average, standard deviation 1.00%"
    )
    assert prove._together([outcome(-0.02, 0.02)]) == []


@pytest.mark.parametrize(
    ("found", "is_expected"),
    [
        (outcome(0.02, 0.06, "FAIL"), True),
        (outcome(0.02, 0.06, "INCONCLUSIVE"), False),
        (outcome(0.02, 0.06, "FAIL", step_effect=0.01, acceptance_effect=0.03), False),
    ],
    ids=["slower step", "not decided", "slower by acceptance"],
)
def test_a_slower_step_has_to_fail_for_the_step(found: dict[str, Any], is_expected: bool) -> None:
    (case,) = [case for case in prove.CASES if case.plant.startswith("step_delay")]
    assert case.is_expected(found) is is_expected


@pytest.mark.parametrize("gate", [prove.SAME, prove.SLOWER, prove.WRONG])
def test_its_gates_are_gates(gate: str, tmp_path: Path) -> None:
    config = parse(f"depths: [128]\n{gate}", GateConfig, "prove")
    assert config.margin == load("default", GateConfig).margin
    assert config.looks[0] >= 4, "fewer launches do not take start order out"
