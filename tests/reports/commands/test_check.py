"""`kernarc-gate check`, the real command line, on runs of decoders of known output."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernarc.harness.run.storage import RunDirectory
from kernarc.reports.saved import CheckState, SavedRun

from .conftest import Gate, WriteBuild


def test_check_judges_a_finished_run_and_notices_a_tampered_one(gate: Gate, build: WriteBuild, tmp_path: Path) -> None:
    builds = f"{build('a')},{build('b')}"
    small = ["--depths", "32", "--requests", "2", "--max-tokens", "33"]
    assert gate("bench", "--builds", builds, *small, "--out", "run").returncode == 0
    sound = gate("check", "run")
    assert sound.returncode == 0, sound.stderr
    assert "PASS" in sound.stdout
    stored = json.loads((tmp_path / "run" / "check.json").read_text())
    assert [entry["verdict"] for entry in stored["output_checks"]] == ["PASS", "PASS"]
    streams = tmp_path / "run" / "streams.jsonl"
    lines = streams.read_text().splitlines()
    changed = json.loads(lines[-1])
    changed["events"][-1]["token_ids"][-1] = (changed["events"][-1]["token_ids"][-1] + 1) % 97
    streams.write_text("\n".join([*lines[:-1], json.dumps(changed)]) + "\n")
    wrong = gate("check", "run", "--json")
    assert wrong.returncode == 1, wrong.stderr
    output = json.loads(wrong.stdout)
    assert output["verdict"] == "FAIL"
    assert sum(entry["divergences"] for entry in output["output_checks"]) == 1


def test_a_check_without_its_model_keeps_what_an_earlier_one_found(
    gate: Gate, build: WriteBuild, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of builds it was not asked about; the model is looked for in the home folder, and where --model says."""
    shutil.copytree(model, tmp_path / "home" / "model")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    small = ["--depths", "32", "--requests", "2", "--max-tokens", "33"]
    assert gate("bench", "--builds", f"{build('a')},{build('b')}", *small, "--out", "run").returncode == 0
    manifest = tmp_path / "run" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(str(model), "~/model"))

    def verdicts() -> list[tuple[str, str]]:
        stored = json.loads((tmp_path / "run" / "check.json").read_text())
        return [(entry["build"], entry["verdict"]) for entry in stored["output_checks"]]

    sound = gate("check", "run")
    assert sound.returncode == 0, sound.stderr
    assert "`kernarc-gate report run` renders the run with it" in sound.stderr
    (tmp_path / "home" / "model").rename(tmp_path / "moved")
    lost = gate("check", "run", "--builds", "b")
    assert lost.returncode == 3, lost.stderr
    assert "b: check.json keeps what an earlier check found" in lost.stderr
    assert verdicts() == [("a", "PASS"), ("b", "PASS")]
    assert gate("check", "run", "--model", "moved").returncode == 0
    assert gate("check", "run", "--model", "nowhere").returncode == 2


def test_a_check_that_allows_more_undoes_no_fail_and_says_so(gate: Gate, build: WriteBuild, tmp_path: Path) -> None:
    """Neither the comparison's nor that of an earlier check; one that allows no more does."""
    loose = tmp_path / "loose.yaml"
    loose.write_text("depths: [32]\noutput_check: {max_divergence_rate: 0.5}\n")
    small = ["--depths", "32", "--requests", "2", "--max-tokens", "33", "--looks", "3"]
    builds = build("right"), build("wrong", "--wrong-token-at", "9")
    assert gate("compare", *builds, *small, "--out", "run").returncode == 1
    for _ in ("the comparison's", "its own"):
        lenient = gate("check", "run", "--config", str(loose), "--json")
        output = json.loads(lenient.stdout)
        assert (lenient.returncode, output["verdict"], output["standing_failures"]) == (1, "FAIL", ["wrong"])
        assert [entry["verdict"] for entry in output["output_checks"]] == ["PASS", "PASS"]
        assert [entry["max_divergence_rate"] for entry in output["output_checks"]] == [0.5, 0.5]
        assert "wrong: the earlier FAIL stands, because it allowed less (0 % of a stream's" in lenient.stderr
        assert SavedRun.load(tmp_path / "run").output_check("wrong").state is CheckState.FAILED
        assert gate("check", "run").returncode == 1


def test_a_check_of_fewer_streams_than_were_planned_is_no_pass(gate: Gate, build: WriteBuild, tmp_path: Path) -> None:
    small = ["--depths", "32", "--requests", "3", "--max-tokens", "33"]
    assert gate("bench", "--builds", f"{build('a')},{build('b')}", *small, "--out", "run").returncode == 0
    streams = tmp_path / "run" / "streams.jsonl"
    lines = streams.read_text().splitlines(keepends=True)
    streams.write_text("".join(line for line in lines if '"d32-l0-r2"' not in line))
    result = gate("check", "run", "--json")
    assert result.returncode == 4, result.stderr
    output = json.loads(result.stdout)
    assert (output["verdict"], output["missing_streams"]) == ("VOID", {"a": 1, "b": 1})
    assert "a: 1 streams are missing from the records: continue with `kernarc-gate bench --resume run`" in result.stderr


def test_a_comparison_killed_in_its_first_launch_is_not_complete(gate: Gate, build: WriteBuild, tmp_path: Path) -> None:
    """Neither check, nor report, nor the page call it whole or take its limit for what was measured."""
    arguments = ["compare", build("a"), build("b"), "--depths", "32", "--requests", "8", "--max-tokens", "33"]
    command = [sys.executable, "-m", "kernarc.cli", *arguments, "--looks", "5,12", "--out", "run"]
    directory = RunDirectory(tmp_path / "run")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while sum(not stream.is_warmup for stream in directory.streams()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    measured = sum(not stream.is_warmup for stream in directory.streams())
    checked = gate("check", "run", "--json")
    assert checked.returncode == 4, checked.stderr
    output = json.loads(checked.stdout)
    assert (output["verdict"], sum(output["missing_streams"].values())) == ("VOID", 16 - measured)
    assert "killed" in output["unfinished"]
    reported = gate("report", "run")
    assert reported.returncode == 4, "no cell is complete"
    assert "run is unfinished: the process that measured it was killed" in reported.stderr
    page = (tmp_path / "run" / "index.html").read_text()
    assert "unfinished, 0 of at most 12 launches of each engine complete" in page
    assert "is unfinished: the process that measured it was killed" in page
    assert "12 launches of each engine," not in page
