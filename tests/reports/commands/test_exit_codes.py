"""What nobody foresaw is no verdict: exit code 4, never the 1 of a slower or wrong candidate."""

import sys
from pathlib import Path

import pytest
from kernarc import cli
from kernarc.cli import main
from kernarc.harness.config.builds import resolve_build
from kernarc.harness.config.models import MeasurementConfig
from kernarc.harness.errors import ConfigError
from kernarc.harness.run.plan import RunPlan

from .conftest import Gate, WriteBuild

FULL = Path("/dev/full")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TypeError("no such thing"), "unexpected TypeError: no such thing\n  this is a fault of kernarc-gate and no"),
        (OSError(28, "No space left on device", "/full/check.json"), "No space left on device: '/full/check.json'"),
    ],
)
def test_an_unforeseen_error_is_4(
    error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "cli", command)
    monkeypatch.setattr(sys, "argv", ["kernarc-gate", "check", "run"])
    with pytest.raises(SystemExit, match="4"):
        main()
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_summary_that_cannot_be_written_is_4_and_the_verdict_is_kept(
    gate: Gate, build: WriteBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(FULL))
    small = ["--depths", "32", "--requests", "2", "--max-tokens", "9", "--looks", "3"]
    result = gate("compare", build("slow", step_ms=48.0), build("fast"), *small, "--out", "run")
    assert result.returncode == 4
    assert "No space left on device" in result.stderr
    assert '"PASS"' in (tmp_path / "run" / "verdict.json").read_text()


def test_an_endpoints_missing_tokenizer_is_a_mistake_of_configuration(tmp_path: Path) -> None:
    path = tmp_path / "there.yaml"
    path.write_text("engine: endpoint\nurl: http://127.0.0.1:9\ntokenizer: /none/tokenizer.json\n")
    plan = RunPlan.of("bench", "test", MeasurementConfig(depths=(32,)), [resolve_build(str(path))], 1)
    with pytest.raises(ConfigError, match=r"/none/tokenizer\.json: this tokenizer cannot be read: No such file"):
        plan.request_set([])
