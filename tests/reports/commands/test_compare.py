"""`kernarc-gate compare` and `calibrate`, the real command line, against decoders of known speed and known output."""

import json
from pathlib import Path
from typing import Any

import pytest
from kernarc.harness.run.run import Run
from kernarc.harness.run.storage import RunDirectory
from kernarc.harness.selftest.conformance.process import ConformanceServer

from .conftest import Gate, WriteBuild

SMALL = ["--depths", "32", "--requests", "4", "--max-tokens", "33", "--looks", "3", "--json"]


def verdict_file(tmp_path: Path, run: str = "run") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tmp_path / run / "verdict.json").read_text())
    return content


def test_slower_step_fails_and_the_report_says_so(
    gate: Gate, build: WriteBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "step-summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    builds = build("fast"), build("slow", step_ms=48.0)
    result = gate("compare", *builds, *SMALL, "--out", "run")
    assert result.returncode == 1, result.stderr
    output = json.loads(result.stdout)
    assert list(output) == ["run_dir", "verdict", "depths", "output_check", "next_step"]
    assert (output["run_dir"], output["verdict"]) == ("run", "FAIL")
    (depth,) = output["depths"]
    assert depth["point_estimate"] == pytest.approx(3, abs=1.5)
    assert depth["step_effect"] == pytest.approx(3, abs=1.5)
    assert depth["acceptance_effect"] == pytest.approx(0, abs=1e-9)
    assert depth["low"] > 0.01
    assert (depth["launches"], depth["pairs"]) == (3, 12)
    assert output["output_check"]["verdict"] == "PASS"
    assert output["output_check"]["positions"] == output["output_check"]["matches"] == 12 * 33
    assert "the effect is from the step" in verdict_file(tmp_path)["sentence"]
    assert summary.read_text().startswith("## FAIL: `slow` against `fast`")
    assert 'type="FAIL"' in (tmp_path / "run" / "junit.xml").read_text()
    assert RunDirectory(tmp_path / "run").manifest().finished_utc is not None


def test_fewer_accepted_drafts_are_attributed_to_acceptance(gate: Gate, build: WriteBuild, tmp_path: Path) -> None:
    """Both take 12 ms a step; one commits 4 tokens a step, the other 2."""
    result = gate("compare", build("four"), build("two", drafts=1), *SMALL, "--out", "run")
    assert result.returncode == 1, result.stderr
    (depth,) = json.loads(result.stdout)["depths"]
    assert depth["acceptance_effect"] == pytest.approx(1.0, abs=1e-9)
    assert abs(depth["step_effect"]) < 0.5
    assert "from the acceptance of drafts" in verdict_file(tmp_path)["sentence"]


def test_faster_passes_with_a_table_and_one_sentence(gate: Gate, build: WriteBuild, tmp_path: Path) -> None:
    builds = build("slow", step_ms=48.0), build("fast")
    result = gate("compare", *builds, *SMALL[:-1], "--out", "run")
    assert result.returncode == 0, result.stderr
    assert "PASS: fast is nowhere slower per token" in result.stdout
    assert "First token, fast to slow (not gated): ×" in result.stdout
    assert "IMPROVED" in result.stdout
    assert "equal in all 12 requests" in result.stdout
    assert "after 3 launches" in result.stderr
    assert verdict_file(tmp_path)["improved_depths"] == [32]


def test_wrong_token_fails_after_one_launch_whatever_the_speed(gate: Gate, build: WriteBuild, tmp_path: Path) -> None:
    builds = build("slow", step_ms=48.0), build("wrong", "--wrong-token-at", "9")
    result = gate("compare", *builds, *SMALL, "--out", "run")
    assert result.returncode == 1, result.stderr
    output = json.loads(result.stdout)
    assert output["verdict"] == output["output_check"]["verdict"] == "FAIL"
    assert output["output_check"]["divergences"] == 4
    found = verdict_file(tmp_path)
    assert found["launches"] == 1
    assert "position 9" in found["sentence"]
    assert "first different in d32-l0-r" in found["identity"]
    assert "the reference's choice" in found["identity"]


def test_wrong_baseline_is_void(gate: Gate, build: WriteBuild, tmp_path: Path) -> None:
    result = gate("compare", build("wrong", "--wrong-token-at", "9"), build("right"), *SMALL)
    assert result.returncode == 4, result.stderr
    assert json.loads(result.stdout)["verdict"] == "VOID"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (["--die-at-request", "2"], "planted fault|ended|exit code 42"),
        (["--exit-at-start", "3"], "exit code 3"),
        (["--stop-early", "5"], "28 tokens came where 33"),
        (["--cached-prompt-tokens", "9"], "cache"),
    ],
    ids=["dies", "does not start", "truncates", "reuses its cache"],
)
def test_broken_engine_is_void_and_exit_code_4(
    gate: Gate, build: WriteBuild, tmp_path: Path, fault: list[str], reason: str
) -> None:
    result = gate("compare", build("sound"), build("broken", *fault), *SMALL, "--out", "run")
    assert result.returncode == 4, result.stderr
    assert json.loads(result.stdout)["verdict"] == "VOID"
    reasons = " ".join(verdict_file(tmp_path)["void_reasons"])
    assert any(part in reasons for part in reason.split("|")), reasons


def test_an_engine_that_never_rests_voids_what_is_measured_beside_it(
    gate: Gate, build: WriteBuild, tmp_path: Path
) -> None:
    builds = build("fast"), build("busy", "--busy-when-idle", step_ms=48.0)
    beside = gate("compare", *builds, *SMALL, "--out", "beside")
    assert beside.returncode == 4, beside.stderr
    step = json.loads(beside.stdout)["next_step"]
    assert "`residency: alternate`" in step
    assert "4 of 4 streams of fast" in step
    reason = "4 of 4 streams of fast were measured while the engine of busy was using the processor"
    assert verdict_file(tmp_path, "beside")["void_reasons"] == [reason]
    for name in ("summary.md", "junit.xml"):
        text = (tmp_path / "beside" / name).read_text()
        assert reason in text
        assert step in text
    config = tmp_path / "alternate.yaml"
    config.write_text("residency: alternate\ndepths: [32]\nrequests_per_depth: 4\nmax_tokens: 33\nlooks: [3]\n")
    alone = gate("compare", *builds, "--config", str(config), "--out", "alone", "--json")
    assert alone.returncode == 1, alone.stderr
    assert json.loads(alone.stdout)["depths"][0]["low"] > 1


def test_endpoints_never_pass_and_fail_for_no_speed(gate: Gate, tmp_path: Path) -> None:
    """Ten times slower or faster in every repeat, and still one start of either server: shown, and not decided."""
    with ConformanceServer() as server:
        fast, slow = (f"endpoint:{server.url(case)}#{case}" for case in ("steady-1ms", "steady-10ms"))
        small = ["--depths", "32", "--requests", "2", "--max-tokens", "65", "--looks", "3,5", "--json"]
        passed = gate("compare", slow, fast, *small, "--out", "improved")
        failed = gate("compare", fast, slow, *small, "--out", "slower")
    assert passed.returncode == 3, passed.stderr
    output = json.loads(passed.stdout)
    assert (output["verdict"], output["output_check"]["verdict"]) == ("INCONCLUSIVE", "INCONCLUSIVE")
    assert "reference_model" in output["next_step"]
    assert failed.returncode == 3, failed.stderr
    output = json.loads(failed.stdout)
    assert output["depths"][0]["low"] > 1
    assert output["depths"][0]["launches"] == 3  # not 5: the second look could settle nothing either
    assert "Let the tool start both engines" in output["next_step"]
    for folder in ("improved", "slower"):
        found = verdict_file(tmp_path, folder)
        assert "were not restarted between launches" in found["sentence"]
        assert (found["improved_depths"], found["launches_needed"]) == ([], None)
        junit = (tmp_path / folder / "junit.xml").read_text()
        assert 'failures="0"' in junit
        assert "| 32 | INCONCLUSIVE |" in (tmp_path / folder / "summary.md").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "kernarc"],
        ["compare", "no-such-build", "kernarc"],
        ["compare", "kernarc", "kernarc", "--config", "no-such-gate"],
        ["compare", "kernarc", "kernarc", "--looks", "2"],
        ["compare", "git:no-such-commit", "kernarc"],
        ["compare", "kernarc", "kernarc", "--resume", "run"],
        ["compare", "kernarc", "kernarc", "--looks", "5,3"],
        ["check", "no-such-run"],
    ],
    ids=lambda arguments: " ".join(arguments[1:]),
)
def test_usage_errors_are_exit_code_2(gate: Gate, arguments: list[str], tmp_path: Path) -> None:
    result = gate(*arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_interrupted_comparison_is_resumed_to_its_verdict(gate: Gate, build: WriteBuild, tmp_path: Path) -> None:
    marker = tmp_path / "died"
    builds = build("fast"), build("slow", "--die-at-request", "3", "--die-once", str(marker), step_ms=48.0)
    first = gate("compare", *builds, *SMALL, "--out", "run")
    assert first.returncode == 4, first.stderr
    again = gate("compare", "--resume", "run", "--json")
    assert again.returncode == 1, again.stderr
    assert json.loads(again.stdout)["depths"][0]["pairs"] == 12


def test_an_unexpected_exception_is_void_never_a_pass(
    gate: Gate, build: WriteBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("kernarc.gates.compare.evaluate", broken)
    result = gate("compare", build("a"), build("b"), *SMALL, "--out", "run")
    assert result.returncode == 4
    assert "ZeroDivisionError: planted" in result.stderr
    assert not (tmp_path / "run" / "verdict.json").exists()


def test_ctrl_c_keeps_what_was_measured_and_says_how_to_resume(
    gate: Gate, build: WriteBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure_launch = Run.measure_launch

    def interrupted(run: Run, launch: int) -> None:
        if launch == 1:
            raise KeyboardInterrupt
        measure_launch(run, launch)

    monkeypatch.setattr(Run, "measure_launch", interrupted)
    builds = build("fast"), build("slow", step_ms=48.0)
    result = gate("compare", *builds, *SMALL, "--out", "run")
    assert result.returncode == 130
    assert "kernarc-gate compare --resume run" in result.stderr
    monkeypatch.setattr(Run, "measure_launch", measure_launch)
    again = gate("compare", "--resume", "run", "--json")
    assert again.returncode == 1, again.stderr
    assert json.loads(again.stdout)["depths"][0]["pairs"] == 12


def test_control_build_is_measured_in_every_block(gate: Gate, build: WriteBuild, tmp_path: Path) -> None:
    config = tmp_path / "controlled.yaml"
    config.write_text(
        f"depths: [32]\nrequests_per_depth: 4\nmax_tokens: 33\nlooks: [3]\ncontrol: {build('control')}\n"
        "max_control_drift: 0.9\n"
    )
    builds = build("fast"), build("slow", step_ms=48.0)
    result = gate("compare", *builds, "--config", str(config), "--out", "run", "--json")
    assert result.returncode == 1, result.stderr
    streams = [stream for stream in RunDirectory(tmp_path / "run").streams() if not stream.is_warmup]
    assert {stream.build for stream in streams} == {"fast", "slow", "control"}


def test_calibrate_measures_an_a_with_a(gate: Gate, build: WriteBuild) -> None:
    small = ["--depths", "32", "--requests", "6", "--max-tokens", "33"]
    result = gate("calibrate", "--build", build("a"), "--launches", "3", "--comparisons", "100", *small, "--json")
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    assert list(output)[:4] == ["false_alarm_rate", "coverage", "power", "comparisons"]
    assert output["void_reasons"] == []
    (noise,) = output["noise"]
    assert noise["depth"] == 32
    assert noise["launch"] >= 0
    assert noise["request"] > 0
    assert noise["detectable"] > 0.01
    assert [row["effect"] for row in output["recommended"]] == [0.02, 0.03, 0.05]


@pytest.mark.parametrize("arguments", [[], ["--simulate", "--build", "kernarc"]], ids=["neither", "both"])
def test_calibrate_wants_one_of_two(gate: Gate, arguments: list[str]) -> None:
    assert gate("calibrate", *arguments).returncode == 2
