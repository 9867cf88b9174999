"""The composite action and its example: valid, closed to injection, and only a PASS passes."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kernarc.gates.outcomes import Verdict

FOLDER = Path(__file__).parents[2] / ".github" / "actions" / "kernarc-gate"
SYSTEM_PATH = "/usr/bin:/bin"


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
    assert all("cancelled()" in gate["if"] for gate in gates[1:]), "a gate that failed hides no later one"
    assert "pull_request.number" in workflow["concurrency"]["group"], "one group for all drops the run that waits"
    assert "baseline" not in gates[0]["with"], "the merge base, not the tip of the base branch"


class Runner:
    """A made-up GitHub runner: a repository whose branch lags behind its base, a gate that notes what it is asked."""

    def __init__(self, folder: Path, exit_code: int = 0) -> None:
        self.repository, self.temp, self.bin = folder / "repository", folder / "temp", folder / "bin"
        for path in (self.repository, self.bin):
            path.mkdir(parents=True)
        self._git("init", "-q", "-b", "main")
        self.left_at = self._commit("where the branch leaves")
        self._git("checkout", "-q", "-b", "change")
        self._commit("the change")
        self._git("checkout", "-q", "main")
        self._commit("what main has gained since")
        self._git("update-ref", "refs/remotes/origin/main", "main")
        self._git("checkout", "-q", "change")
        self.asked = folder / "asked"
        self._script(
            self.temp / "kernarc-gate" / "bin" / "kernarc-gate", f'echo "$@" >> {self.asked}; exit {exit_code}'
        )
        self._script(self.temp / "kernarc-gate" / "bin" / "pip", f'echo "pip $@" >> {self.asked}')
        self._script(self.bin / "made-up-python", "exit 0")

    def _git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@nowhere.invalid"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=self.repository, check=True, capture_output=True, text=True).stdout.strip()

    def _commit(self, message: str) -> str:
        self._git("commit", "-q", "--allow-empty", "-m", message)
        return self._git("rev-parse", "HEAD")

    @staticmethod
    def _script(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def add_nvidia_smi(self) -> None:
        self._script(self.bin / "nvidia-smi", "exit 0")

    def play(self, step: dict[str, Any], **inputs: str) -> tuple[int, dict[str, str]]:
        """The step as a runner plays it → its exit code and its outputs."""
        outputs = self.temp / "outputs"
        outputs.write_text("")
        environment = {
            "PATH": f"{self.bin}:{SYSTEM_PATH}",
            "HOME": os.environ.get("HOME", "/"),
            "RUNNER_TEMP": str(self.temp),
            "GITHUB_OUTPUT": str(outputs),
            "GITHUB_ACTION_PATH": "/actions/kernarc-gate",
            "GITHUB_BASE_REF": "main",
            "GITHUB_JOB": "gate",
            "GITHUB_RUN_ATTEMPT": "1",
            "JOB_INDEX": "0",
            "GATE_PYTHON": "made-up-python",
            "BASELINE": "",
            "CANDIDATE": "git:HEAD",
            "CONFIG": "default",
            "DEPTHS": "",
            "OUT": "kernarc-gate-run",
            **inputs,
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        result = subprocess.run(
            command, cwd=self.repository, env=environment, capture_output=True, text=True, check=False
        )
        pairs = (line.partition("=") for line in outputs.read_text().splitlines())
        return result.returncode, {name: value for name, _, value in pairs}


def _step(action: dict[str, Any], name: str) -> dict[str, Any]:
    step: dict[str, Any] = next(step for step in action["runs"]["steps"] if step["name"] == name)
    return step


@pytest.mark.parametrize(("code", "verdict"), [(0, "PASS"), (1, "FAIL"), (2, ""), (3, "INCONCLUSIVE"), (4, "VOID")])
def test_the_baseline_is_the_merge_base_and_the_exit_code_the_gates(
    code: int, verdict: str, action: dict[str, Any], tmp_path: Path
) -> None:
    runner = Runner(tmp_path, code)
    returned, outputs = runner.play(_step(action, "Compare"))
    assert runner.asked.read_text().startswith(f"compare git:{runner.left_at} git:HEAD --config default ")
    assert (returned, outputs["verdict"]) == (code, verdict)


def test_a_baseline_that_is_given_is_taken(action: dict[str, Any], tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.play(_step(action, "Compare"), BASELINE="git:v1", DEPTHS="128,8192")
    asked = runner.asked.read_text().strip()
    assert asked == "compare git:v1 git:HEAD --config default --out kernarc-gate-run --depths 128,8192"


def test_without_a_common_commit_nothing_is_measured(action: dict[str, Any], tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    returned, outputs = runner.play(_step(action, "Compare"), GITHUB_BASE_REF="gone")
    assert (returned, outputs.get("verdict")) == (2, None)
    assert not runner.asked.exists()


def test_no_two_calls_keep_their_runs_under_one_name(action: dict[str, Any], tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    changes = ({}, {"OUT": "text/run"}, {"JOB_INDEX": "1"}, {"GITHUB_JOB": "other"}, {"GITHUB_RUN_ATTEMPT": "2"})
    names = [runner.play(_step(action, "Compare"), **change)[1]["artifact"] for change in changes]
    assert len(set(names)) == len(changes)
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names)
    assert _step(action, "Keep the run")["with"]["name"] == "${{ steps.compare.outputs.artifact }}"


@pytest.mark.skipif(
    shutil.which("nvidia-smi", path=SYSTEM_PATH) is not None, reason="a card is here whatever is made up"
)
def test_a_card_brings_what_watches_it(action: dict[str, Any], tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.play(_step(action, "Install kernarc-gate"))
    runner.add_nvidia_smi()
    runner.play(_step(action, "Install kernarc-gate"))
    without, with_card = runner.asked.read_text().splitlines()
    assert without.endswith("/../../..")
    assert with_card.endswith("/../../..[gpu]")


def test_readme_states_every_exit_code() -> None:
    text = (FOLDER / "README.md").read_text()
    for verdict in Verdict:
        assert re.search(
            rf"\| {verdict.exit_code} \| {verdict.value}: .*\| {'yes' if verdict is Verdict.PASS else 'no'} \|", text
        )
