"""Engines start, are told of, and never outlive us: not after success, failure, Ctrl-C or kill -9."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from kernarc.harness.config.builds import Build, resolve_build
from kernarc.harness.config.models import BuildConfig, LimitsConfig
from kernarc.harness.engines.base import RunningEngine, cache_hits, parse_counters
from kernarc.harness.engines.endpoint import connect
from kernarc.harness.engines.process import PortTakenError, describe_exit, free_port, without_relative_folders
from kernarc.harness.engines.registry import engine_of
from kernarc.harness.errors import ConfigError, EngineError

MakeBuild = Callable[..., Build]
FindProcesses = Callable[[str], list[int]]


@pytest.fixture
def marker() -> str:
    return f"marker-{uuid.uuid4().hex}"


def start(build: Build, log_path: Path, **limits: float) -> RunningEngine:
    model = Path(build.model_source.path or "") if build.model_source else Path()
    return engine_of(build, 200).start(model, log_path, LimitsConfig(**limits))


def wait_until_gone(find: FindProcesses, marker: str) -> list[int]:
    deadline = time.monotonic() + 10
    while find(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    return find(marker)


def test_an_engine_starts_answers_and_stops_with_all_it_started(
    fake_build: MakeBuild, tmp_path: Path, marker: str, processes_with: FindProcesses
) -> None:
    told: list[tuple[float, str]] = []
    build = fake_build("a", "--marker", marker, "--stray-child", "--start-s", "1")
    engine = engine_of(build, 200).start(
        Path(build.model_source.path or "") if build.model_source else Path(),
        tmp_path / "a.log",
        LimitsConfig(),
        lambda seconds, line: told.append((seconds, line)),
    )
    assert engine.model_name == "fake"
    assert engine.ready_s >= 1
    assert told[-1][1] == "loading"
    assert engine.counters() == {"kernarc_drafts_total": 0.0, "fake:prefix_cache_hits_total": 0.0}
    assert len(processes_with(marker)) >= 3, "supervisor, engine, and the child in a session of its own"
    engine.stop()
    assert processes_with(marker) == []
    assert "serve" in (tmp_path / "a.log").read_text().splitlines()[0], "the log begins with the command"


def test_a_folder_kernarc_where_we_are_is_not_what_an_engine_runs(
    fake_build: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernarc").mkdir()
    (tmp_path / "kernarc" / "__init__.py").touch()
    (tmp_path / "kernarc" / "cli.py").write_text("raise SystemExit(77)\n")
    monkeypatch.chdir(tmp_path)
    engine = start(fake_build("a", environment={"PYTHONSAFEPATH": ""}), tmp_path / "a.log", start_s=20)
    engine.stop()
    assert engine.model_name == "fake"


def test_a_proxy_of_the_environment_is_not_asked(
    fake_build: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    engine = start(fake_build("a"), tmp_path / "a.log", start_s=20)
    assert engine.counters()
    engine.stop()


def test_an_engine_that_ends_while_starting_tells_code_and_log(fake_build: MakeBuild, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="a ended while starting with exit code 3") as error:
        start(fake_build("a", "--exit-at-start", "3"), tmp_path / "a.log")
    assert "  | error: no such weights" in error.value.message
    assert str(tmp_path / "a.log") in error.value.hint


@pytest.mark.parametrize("answers", [False, True], ids=["silent", "answering"])
def test_a_port_that_another_took_in_between_is_given_up_for_another(
    answers: bool, fake_build: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str
) -> None:
    class Foreign(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"data": [{"id": "foreign"}]}'
            self.send_response(200 if answers else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as foreign:
        Thread(target=foreign.serve_forever, daemon=True).start()
        ports = iter([foreign.server_address[1], free_port()])
        monkeypatch.setattr("kernarc.harness.engines.base.free_port", lambda: next(ports))
        engine = start(fake_build("a", "--marker", marker), tmp_path / "a.log", start_s=30)
        foreign.shutdown()
    assert engine.model_name == "fake"
    assert not engine.base_url.endswith(str(foreign.server_address[1]))
    engine.stop()


def test_an_engine_that_never_gets_its_port_says_so(
    fake_build: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("kernarc.harness.engines.base.free_port", lambda: taken.getsockname()[1])
        monkeypatch.setattr("kernarc.harness.engines.base.ANSWER_S", 0.2)
        with pytest.raises(PortTakenError, match="in use"):
            start(fake_build("a"), tmp_path / "a.log", start_s=30)


def test_folders_that_are_none_are_not_passed_on() -> None:
    """The XDG specification: empty is unset, relative is ignored."""
    environment = {"XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": "here", "XDG_DATA_HOME": "/data", "HOME": "", "A": "1"}
    assert without_relative_folders(environment) == {"XDG_DATA_HOME": "/data", "HOME": "", "A": "1"}


def test_an_engine_that_takes_too_long_is_stopped(
    fake_build: MakeBuild, tmp_path: Path, marker: str, processes_with: FindProcesses
) -> None:
    build = fake_build("a", "--start-s", "60", "--marker", marker)
    with pytest.raises(EngineError, match=r"did not answer within 1\.5 s\n  \| loading"):
        start(build, tmp_path / "a.log", start_s=1.5)
    assert processes_with(marker) == []


def test_an_engine_that_ignores_the_polite_signal_is_killed(
    fake_build: MakeBuild, tmp_path: Path, marker: str, processes_with: FindProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernarc.harness.engines.process.STOP_GRACE_S", 0.5)
    engine = start(fake_build("a", "--ignore-sigterm", "--marker", marker), tmp_path / "a.log")
    engine.stop()
    assert processes_with(marker) == []


def test_a_killed_engine_is_told_with_its_signal(
    fake_build: MakeBuild, tmp_path: Path, marker: str, processes_with: FindProcesses
) -> None:
    engine = start(fake_build("a", "--marker", marker), tmp_path / "a.log")
    engine_pid = max(processes_with(marker))
    os.kill(engine_pid, signal.SIGKILL)
    assert wait_until_gone(processes_with, marker) == []
    with pytest.raises(EngineError, match=r"ended while answering x with exit code 137 \(SIGKILL: killed"):
        engine.raise_if_dead("while answering x")
    engine.stop()


def test_a_program_that_does_not_exist(fake_build: MakeBuild, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="exit code 127") as error:
        start(fake_build("a", python="/nowhere/python"), tmp_path / "a.log")
    assert "cannot start /nowhere/python" in error.value.message


CLIENT = """
    import sys, time
    from pathlib import Path
    from kernarc.harness.config.builds import Build, resolve_build
    from kernarc.harness.config.models import LimitsConfig
    from kernarc.harness.engines.registry import engine_of
    build = Build.model_validate_json(sys.argv[1])
    engine_of(build, 200).start(Path(sys.argv[2]), Path(sys.argv[3]), LimitsConfig())
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda ending: ending.name)
def test_when_the_client_goes_its_engines_go(
    ending: signal.Signals, fake_build: MakeBuild, tmp_path: Path, marker: str, processes_with: FindProcesses
) -> None:
    build = fake_build("a", "--marker", marker, "--stray-child")
    arguments = [build.model_dump_json(), build.model_source.path or "" if build.model_source else ""]
    client = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CLIENT), *arguments, str(tmp_path / "a.log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"ready\n"
    client.send_signal(ending)
    client.wait(10)
    client.stdout.close()
    assert wait_until_gone(processes_with, marker) == []


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(139) == "exit code 139 (SIGSEGV)"


def test_counters_are_summed_over_labels_and_others_ignored() -> None:
    text = textwrap.dedent("""
        # TYPE vllm:prefix_cache_hits_total counter
        vllm:prefix_cache_hits_total{engine="0",model_name="m"} 3.0
        vllm:prefix_cache_hits_total{engine="1",model_name="m"} 4.0
        vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e9
        vllm:spec_decode_num_accepted_tokens_total{engine="0"} 1.5e+02
        process_open_fds 12
    """)
    counters = parse_counters(text)
    assert counters == {"vllm:prefix_cache_hits_total": 7.0, "vllm:spec_decode_num_accepted_tokens_total": 150.0}
    assert cache_hits({"vllm:prefix_cache_hits_total": 5.0}, counters) == 2.0
    assert cache_hits(counters, counters) == 0.0


def test_an_endpoint_that_does_not_answer() -> None:
    with pytest.raises(EngineError, match=r"no OpenAI-compatible server answers at http://127\.0\.0\.1:9"):
        connect(resolve_build("endpoint:http://127.0.0.1:9"))


def test_an_endpoint_s_key_comes_from_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Build(name="e", config=BuildConfig(engine="endpoint", url="http://127.0.0.1:9", api_key_variable="NO_KEY"))
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable NO_KEY is not set"):
        connect(build)
