"""serve, generate and model as a person runs them: real processes, real checkpoint, messages for every mistake."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from kernarc.cli import main
from kernarc.decoder.checkpoint.synthetic import TokenCycle, write_structured_checkpoint
from kernarc.harness.config.checkpoints import Checkpoint

from ..fakes.live_server import small_tokenizer
from ..fakes.runs import SyntheticRun

CYCLE = TokenCycle.make(2048, 0.87, 0)
COMMAND = [sys.executable, "-m", "kernarc.cli"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@dataclass
class Done:
    code: int
    out: str
    errors: str


class Run(Protocol):
    def __call__(self, *arguments: str, code: int = 0) -> Done: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command's own entry point, in this process."""

    def call(*arguments: str, code: int = 0) -> Done:
        monkeypatch.setattr(sys, "argv", ["kernarc-gate", *arguments])
        capsys.readouterr()
        returned = 0
        try:
            main()
        except SystemExit as ended:
            returned = int(ended.code or 0)
        out, errors = capsys.readouterr()
        assert returned == code, errors
        return Done(returned, out, errors)

    return call


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "tiny"
    write_structured_checkpoint("tiny", out)
    return out


def test_synth(run: Run, tmp_path: Path, tiny: Path) -> None:
    done = run("model", "synth", "--shape", "tiny", "--out", str(tmp_path / "new"), "--json")
    assert json.loads(done.out)["path"] == str(tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


def test_a_draft_vocabulary_is_counted_over_the_model_s_own_outputs(run: Run, tmp_path: Path) -> None:
    model, vocabulary = tmp_path / "model", tmp_path / "vocab.json"
    run("model", "synth", "--shape", "tiny", "--emitted", "64", "--out", str(model))
    recorded = SyntheticRun(depths=(128,), launches=1, requests_per_depth=2, tokens=32).write(tmp_path / "recorded")
    arguments = ["model", "draft-vocab", str(model), "--from", str(recorded), "--size", "100", "--out", str(vocabulary)]
    assert "no build of this run ran this checkpoint" in run(*arguments, code=2).errors
    manifest = json.loads((recorded / "manifest.json").read_text())
    manifest["builds"][1]["model_sha256"] = Checkpoint(model).sha256()
    (recorded / "manifest.json").write_text(json.dumps(manifest))
    streams = [json.loads(line) for line in (recorded / "streams.jsonl").read_text().strip().split("\n")]
    own = [stream for stream in streams if stream["build"] == manifest["builds"][1]["name"]]
    counts = Counter(token % 2048 for stream in own for event in stream["events"] for token in event["token_ids"])
    for stream in streams:  # within this model's vocabulary
        for event in stream["events"]:
            event["token_ids"] = [token % 2048 for token in event["token_ids"]]
    (recorded / "streams.jsonl").write_text("".join(json.dumps(stream) + "\n" for stream in streams))
    facts = json.loads(run(*arguments, "--json").out)
    assert facts["tokens"] == counts.total() == 2 * 32
    assert (facts["seen"], facts["coverage"]) == (len(counts), 1.0)
    ids = json.loads(vocabulary.read_text())["ids"]
    assert ids[: len(counts)] == sorted(counts, key=lambda token: (-counts[token], token))
    assert len(set(ids)) == 100
    said = run("generate", str(model), "ids:5,6", "--max-tokens", "40", "--draft-vocab", str(vocabulary)).out
    assert said == run("generate", str(model), "ids:5,6", "--max-tokens", "40").out


class Served:
    """`serve` as a process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *arguments, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        self.ready: dict[str, Any] = json.loads(line)
        self.port = int(self.ready["url"].rsplit(":", 1)[1])

    def complete(self, **body: Any) -> list[int]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(
            "POST", "/v1/completions", json.dumps({"return_token_ids": True, "ignore_eos": True, **body})
        )
        answer = json.loads(connection.getresponse().read())
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, float]:
        """(exit code, stderr, seconds)"""
        started = time.monotonic()
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors, time.monotonic() - started


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Served]:
    server = Served(str(tiny), "--port", "0")
    yield server
    code, errors, _ = server.stop()
    assert code == 0
    assert re.fullmatch(r"serving \S+ at http://127\.0\.0\.1:\d+/v1 \(cpu, 3 drafts a step, window 32768\)\n", errors)


def test_serve_answers_with_the_known_output(served: Served, tiny: Path) -> None:
    assert served.ready["model"] == str(tiny)
    assert served.complete(prompt=[1, 2, 900], max_tokens=50, model=str(tiny)) == CYCLE.continuation(900, 50)
    assert served.complete(prompt=[1, 2, 900], max_tokens=50, model="tiny") == CYCLE.continuation(900, 50)


def test_serve_listens_on_the_loopback_alone(served: Served) -> None:
    with open(f"/proc/{served.process.pid}/net/tcp") as table:
        listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    assert f"0100007F:{served.port:04X}" in listening
    assert f"00000000:{served.port:04X}" not in listening


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_stops_cleanly_in_the_middle_of_a_stream(tiny: Path, number: signal.Signals) -> None:
    server = Served(str(tiny), "--port", "0", "--num-speculative-tokens", "0", "--threads", "1")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        body = b'{"prompt": [1], "max_tokens": 30000, "ignore_eos": true, "stream": true}'
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        received = connection.recv(65536)
        while b"data: " not in received:
            received += connection.recv(65536)
        code, errors, seconds = server.stop(number)
        while more := connection.recv(1 << 20):
            received += more
    assert (code, errors.count("\n")) == (0, 1)
    assert seconds < 5
    assert b'"error"' in received
    assert b"[DONE]" not in received


def test_serve_on_a_port_in_use(run: Run, served: Served, tiny: Path) -> None:
    done = run("serve", str(tiny), "--port", str(served.port), code=2)
    assert done.errors.startswith(f"error: port {served.port} on 127.0.0.1 is in use\n  ")


def test_drafts_chosen_by_acceptance_leave_the_output_alone(tiny: Path, run: Run) -> None:
    shown = json.loads(
        run("generate", str(tiny), "ids:900", "--max-tokens", "60", "--num-speculative-tokens", "auto", "--json").out
    )
    assert shown["token_ids"] == CYCLE.continuation(900, 60)
    server = Served(str(tiny), "--port", "0", "--num-speculative-tokens", "auto")
    assert server.ready["num_speculative_tokens"] == "auto"
    assert server.complete(prompt=[900], max_tokens=60) == CYCLE.continuation(900, 60)
    assert server.stop()[0] == 0


def test_serve_with_a_plant(tiny: Path) -> None:
    server = Served(str(tiny), "--port", "0", "--plant", "wrong_token=0.2", "--plant-seed", "3")
    first, second = (server.complete(prompt=[900], max_tokens=60) for _ in range(2))
    assert server.stop()[0] == 0
    assert first == second != CYCLE.continuation(900, 60)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "/nowhere"], "/nowhere/config.json does not exist"),
        (["serve", "{tiny}", "--plant", "typo"], "there is no test plant 'typo'"),
        (["serve", "{tiny}", "--num-speculative-tokens", "9"], "num_speculative_tokens is 9, expected 0 … 8"),
        (["serve", "{tiny}", "--num-speculative-tokens", "many"], "neither a number of drafts nor auto"),
        (["serve", "{tiny}", "--draft-context", "some"], "'some' is neither a number of prompt positions nor all"),
        (["generate", "{tiny}", "ids:1", "--draft-window", "-3"], "neither a number of prompt positions nor all"),
        (["serve", "{tiny}", "--device", "cpu", "--prefill-dtype", "fp8"], "neither quantises nor multiplies in FP8"),
        (["generate", "{tiny}", "ids:1", "--draft-vocab", "/nowhere"], "draft vocabulary /nowhere cannot be read"),
        (["serve", "{tiny}", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["serve", "{tiny}", "--max-context", "40000"], "max_context is 40000"),
        (["generate", "{tiny}", "hello"], "no tokenizer"),
        (["generate", "{tiny}"], "is a model: what should it continue?"),
        (["generate", "nomodel", "x"], "or python-7m"),
        (["generate", "{tiny}", "two", "words"], "quote a prompt that has spaces"),
        (["generate", "{tiny}", "ids:1,x"], "is not a list of ids"),
        (["generate", "{tiny}", "ids:5000"], "prompt token 0 is 5000"),
        (["model", "info", "/nowhere"], "/nowhere/config.json does not exist"),
        (["model", "info", "{tiny}", "--depths", "8,x"], "--depths"),
        (["model", "quantize", "{tiny}", "{tiny}"], "already exists"),
        (["model", "synth", "--shape", "huge", "--out", "{tiny}-2"], "no shape named 'huge'"),
        (["model", "synth", "--shape", "tiny", "--out", "{tiny}"], "already exists"),
        (["model", "synth", "--shape", "tiny", "--out", "/proc/nowhere/x"], "cannot be written to"),
    ],
)
def test_mistakes_are_explained(run: Run, tiny: Path, arguments: list[str], said: str) -> None:
    done = run(*(argument.replace("{tiny}", str(tiny)) for argument in arguments), code=2)
    assert said in done.errors
    assert done.out == ""


def test_a_truncated_checkpoint_is_named(run: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:-1000])
    assert "truncated" in run("serve", str(tmp_path), "--port", "0", code=2).errors


def test_generate_prints_ids_and_a_summary(run: Run, tiny: Path) -> None:
    done = run("generate", str(tiny), "ids:1,900", "--max-tokens", "20")
    assert [int(item) for item in done.out.strip().split(",")] == CYCLE.continuation(900, 20)
    assert re.search(
        r"20 tokens after 2, first after \d+ ms, \d+ tokens/s, [\d.]+ tokens a step \(\d+% of", done.errors
    )


def test_generate_streams_text(run: Run, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "text")
    library = small_tokenizer()
    library.save(str(tmp_path / "text" / "tokenizer.json"))
    done = run("generate", str(tmp_path / "text"), "def", "--max-tokens", "200")
    ids = CYCLE.continuation(library.encode("def").ids[-1], 200)
    assert done.out == library.decode(ids) + "\n"


def test_generate_continues_python_without_a_model(run: Run) -> None:
    done = run("generate", "def add(a, b):\n    return", "--max-tokens", "8")
    assert done.out.strip()
    assert "8 tokens after" in done.errors
    assert run("generate", "python-7m", "def add(a, b):\n    return", "--max-tokens", "8").out == done.out


def test_generate_json(run: Run, tiny: Path) -> None:
    done = run("generate", str(tiny), "ids:1,900", "--max-tokens", "20", "--num-speculative-tokens", "0", "--json")
    result = json.loads(done.out)
    assert result["token_ids"] == CYCLE.continuation(900, 20)
    assert (result["prompt_tokens"], result["tokens_per_step"], result["acceptance_rate"]) == (2, 1.0, None)


def test_generate_interrupted_keeps_what_came(tiny: Path) -> None:
    command = [*COMMAND, "generate", str(tiny), "ids:900", "--max-tokens", "20000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=ENVIRONMENT)
    assert process.stdout is not None
    begun = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"(interrupted)" in errors
    assert b"Traceback" not in errors
    ids = [int(item) for item in (begun + rest).split(b",")]
    assert ids == CYCLE.continuation(900, len(ids))


def test_info_and_quantize(run: Run, tiny: Path, tmp_path: Path) -> None:
    done = run("model", "quantize", str(tiny), str(tmp_path / "fp8"), "--json")
    n_bytes = json.loads(done.out)["bytes"]
    info = json.loads(run("model", "info", str(tmp_path / "fp8"), "--json", "--depths", "128").out)
    assert info["n_bytes"] == n_bytes
    assert [floor["depth"] for floor in info["step_floors"]] == [128]
    text = run("model", "info", str(tiny), "--bandwidth", "0.02").out
    assert "3 gated delta net, 1 full attention, one MTP layer" in text
    assert "ms at 0.02 TB/s" in text
