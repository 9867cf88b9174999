"""`kernarc-gate bench`, the real command line, against servers of known speed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from kernarc.harness.run.storage import RunDirectory
from kernarc.harness.selftest.conformance.process import ConformanceServer
from kernarc.harness.selftest.conformance.truth import Truth

from .conftest import FAKE_DECODER

COMMAND = [sys.executable, "-m", "kernarc.cli", "bench"]


@pytest.fixture(scope="module")
def server() -> Iterator[ConformanceServer]:
    with ConformanceServer() as running:
        yield running


def bench(*arguments: str, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment}, check=False
    )


def endpoint(server: ConformanceServer, case: str) -> str:
    return f"endpoint:{server.url(case)}#{case}"


@pytest.fixture
def fake_build(tmp_path: Path) -> Path:
    """A build file whose engine is the stand-in decoder at 5 ms a step of 4 tokens."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 90}')
    path = tmp_path / "fake.yaml"
    path.write_text(
        f"engine: kernarc\nnum_speculative_tokens: 3\nmodel: {{path: {model}}}\n"
        f"pythonpath: [{FAKE_DECODER}]\nextra_args: [--step-ms, '5']\n"
    )
    return path


def true_tpot_ms(truth: Truth) -> float:
    """From the server's own log: on a busy machine it writes late itself now and then."""
    return (truth.events[-1].written_ns - truth.events[0].written_ns) / (len(truth.events) - 1) / 1e6


def test_servers_of_known_speed(server: ConformanceServer, tmp_path: Path) -> None:
    server.new_truths()  # those of other tests
    builds = f"{endpoint(server, 'steady-10ms')},{endpoint(server, 'chunks-1')}"
    arguments = ["--depths", "32,64", "--requests", "5", "--max-tokens", "100", "--out", "run", "--json"]
    result = bench("--builds", builds, *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    assert list(output) == ["run_dir", "cells"]
    assert output["run_dir"] == "run"
    keys = [
        "build",
        "depth",
        "tpot_ms",
        "step_ms",
        "tokens_per_step",
        "ttft_ms",
        "streams",
        "void_streams",
        "void_reasons",
    ]
    assert all(list(cell) == keys for cell in output["cells"])
    speeds = {(cell["build"].rpartition("/")[2], cell["depth"]): cell for cell in output["cells"]}
    assert set(speeds) == {(case, depth) for case in ("steady-10ms", "chunks-1") for depth in (32, 64)}
    truths = server.new_truths()
    for (case, depth), cell in speeds.items():
        played = [true_tpot_ms(truth) for truth in truths if (truth.case, truth.prompt_tokens) == (case, depth)]
        assert len(played) == 1 + 5, "a warm-up and five measured"
        assert cell["tpot_ms"] == pytest.approx(median(played[1:]), rel=0.02)
        assert cell["tpot_ms"] == pytest.approx(10 if case == "steady-10ms" else 4, rel=0.2)
        assert cell["tokens_per_step"] == 1
        assert (cell["streams"], cell["void_streams"], cell["void_reasons"]) == (5, 0, [])
    made = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"manifest.json", "streams.jsonl", "table.md", "table.json", "speed.svg", "speed.png"} <= made
    assert "chunks-1" in (tmp_path / "run" / "table.md").read_text()


def test_the_table_is_on_the_screen_and_says_whether_ids_agree(fake_build: Path, tmp_path: Path) -> None:
    arguments = ["--builds", f"{fake_build},{fake_build}", "--depths", "32", "--requests", "2", "--max-tokens", "21"]
    result = bench(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "greedy ids of fake-2 and fake: equal in all 2 requests" in result.stdout
    assert "fake" in result.stdout.splitlines()[1] + result.stdout
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"run directory: runs/{run_dir.name}" in result.stderr
    assert "launch 0: fake is ready after" in result.stderr


def test_void_cells_have_no_speed_and_exit_code_4(server: ConformanceServer, tmp_path: Path) -> None:
    arguments = ["--depths", "32", "--requests", "2", "--max-tokens", "40", "--out", "run", "--json"]
    result = bench("--builds", endpoint(server, "cached-prefix"), *arguments, cwd=tmp_path)
    assert result.returncode == 4
    (cell,) = json.loads(result.stdout)["cells"]
    assert (cell["tpot_ms"], cell["step_ms"], cell["ttft_ms"]) == (None, None, None)
    assert (cell["streams"], cell["void_streams"]) == (2, 2)
    assert "cached prompt tokens" in cell["void_reasons"][0]
    assert "void: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--config", "defalt"], 2, "did you mean 'default'?"),
        (["--config", "missing.yaml"], 2, "there is no file missing.yaml"),
        (["--builds", "kernac"], 2, "did you mean 'kernarc'?"),
        (["--builds", "endpoint:nowhere"], 2, "names no server"),
        (["--builds", "endpoint:http://127.0.0.1:9"], 4, "no OpenAI-compatible server answers at http://127.0.0.1:9"),
        (["--builds", "endpoint:http://127.0.0.1:9#m"], 4, "no OpenAI-compatible server answers"),
        (["--builds", ","], 2, "expected names separated by commas"),
        (["--depths", "128,8K"], 2, "is not a list of whole numbers"),
        (["--depths", "4"], 2, "error: --depths: 'depths.0': input should be greater than or equal to 17, got 4\n"),
        (["--requests", "0"], 2, "--requests: 'requests_per_depth': input should be greater"),
        (["--builds", "kernarc", "--depths", "32768"], 2, "its model python-7m holds 16,384"),
        (["--builds", "kernarc", "--out", "/proc/nowhere"], 2, "no run directory can be made at /proc/nowhere"),
        (["--max-tokens", "many"], 2, "'many' is not a valid integer"),
        (["--model", "/nowhere", "--builds", "kernarc"], 2, "/nowhere is not a checkpoint directory"),
        (["--dephts", "128"], 2, "No such option"),
        (["--resume", "nowhere"], 2, "nowhere is not a run directory"),
        (["--resume", "x", "--depths", "128"], 2, "--resume takes everything from the run"),
        (["--resume", "x", "--config", "default"], 2, "--resume takes everything from the run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_a_newcomer_gets_wrong(arguments: list[str], code: int, said: str, tmp_path: Path) -> None:
    result = bench(*arguments, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_run_is_not_overwritten(fake_build: Path, tmp_path: Path) -> None:
    arguments = ["--builds", str(fake_build), "--depths", "32", "--requests", "1", "--max-tokens", "9", "--out", "run"]
    assert bench(*arguments, cwd=tmp_path).returncode == 0
    before = (tmp_path / "run" / "streams.jsonl").read_bytes()
    again = bench(*arguments, cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    assert (tmp_path / "run" / "streams.jsonl").read_bytes() == before


def test_ctrl_c_keeps_what_was_measured_and_resume_completes_it(fake_build: Path, tmp_path: Path) -> None:
    arguments = [
        "--builds",
        str(fake_build),
        "--depths",
        "32,64",
        "--requests",
        "6",
        "--max-tokens",
        "81",
        "--out",
        "run",
    ]
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    streams = tmp_path / "run" / "streams.jsonl"
    deadline = time.monotonic() + 60
    while not (streams.exists() and streams.read_bytes().count(b"\n") >= 4):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert output == ""
    assert "of 12 streams are kept; continue with `kernarc-gate bench --resume run`" in errors
    assert "Traceback" not in errors
    kept = [stream for stream in RunDirectory(tmp_path / "run").streams() if not stream.is_warmup]
    assert 2 <= len(kept) < 12

    result = bench("--resume", "run", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [cell["streams"] for cell in json.loads(result.stdout)["cells"]] == [6, 6]
    complete = [stream for stream in RunDirectory(tmp_path / "run").streams() if not stream.is_warmup]
    assert complete[: len(kept)] == kept
    (interruption,) = RunDirectory(tmp_path / "run").manifest().interruptions
    assert (interruption.reason, interruption.streams_done) == ("Ctrl-C", len(kept))

    again = bench("--resume", "run", "--json", cwd=tmp_path)
    assert again.returncode == 0, "a finished run has nothing left to do"
    assert json.loads(again.stdout) == json.loads(result.stdout)


def test_without_vllm_the_decoder_is_measured_with_and_without_drafts(tmp_path: Path) -> None:
    arguments = ["--depths", "128", "--requests", "1", "--max-tokens", "32", "--json"]
    result = bench(*arguments, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    assert [cell["build"] for cell in json.loads(result.stdout)["cells"]] == ["kernarc-no-drafts", "kernarc"]
    assert "add it with `kernarc-gate engines install vllm`" in result.stderr
    drafted = json.loads(result.stdout)["cells"][1]
    assert 1 < drafted["tokens_per_step"] <= 4
