"""The composite action and its example: valid, closed to injection, and only a PASS passes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kernarc.gates.outcomes import Verdict

FOLDER = Path(__file__).parents[2] / ".github" / "actions" / "kernarc-gate"


@pytest.fixture
def action() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / "action.yml").read_text())
    return content


def test_every_input_used_is_declared_and_every_declared_one_is_used(action: dict[str, Any]) -> None:
    used = set(re.findall(r"inputs\.([\w-]+)", (FOLDER / "action.yml").read_text()))
    assert used == set(action["inputs"])


def test_no_expression_reaches_a_shell_script(action: dict[str, Any]) -> None:
    for step in action["runs"]["steps"]:
        assert "${{" not in step.get("run", "")


def test_exit_codes_are_the_gates_own(action: dict[str, Any]) -> None:
    script = next(step["run"] for step in action["runs"]["steps"] if step.get("id") == "compare")
    for verdict in Verdict:
        assert f"{verdict.exit_code}) verdict={verdict.value} ;;" in script
    assert script.rstrip().endswith('exit "$code"')


def test_example_calls_the_action_with_inputs_it_has(action: dict[str, Any]) -> None:
    workflow = yaml.safe_load((FOLDER / "example-workflow.yml").read_text())
    checkout, *gates = workflow["jobs"]["gate"]["steps"]
    assert checkout["with"]["fetch-depth"] == 0
    for gate in gates:
        assert gate["uses"] == "./.github/actions/kernarc-gate"
        assert set(gate["with"]) <= set(action["inputs"])
    assert [gate["with"]["config"] for gate in gates] == ["default", "text"]
    assert len({gate["with"].get("out") for gate in gates}) == len(gates)  # neither overwrites the other


def test_readme_states_every_exit_code() -> None:
    text = (FOLDER / "README.md").read_text()
    for verdict in Verdict:
        assert re.search(
            rf"\| {verdict.exit_code} \| {verdict.value}: .*\| {'yes' if verdict is Verdict.PASS else 'no'} \|", text
        )
