"""What every engine has in common once it answers HTTP: a URL, a model name, counters, an end."""

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import requests

from ..config.builds import Build
from ..config.models import LimitsConfig
from ..config.source_code import SourceCode
from ..errors import EngineError
from .process import EngineProcess, PortTakenError, free_port

POLL_S = 0.2
PORT_TRIES = 3
ANSWER_S = 10.0
DYING_S = 10.0
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
COUNTERS = re.compile(
    r"prefix_cache|cached_tokens|spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total|kernarc_\w+_total"
)
CACHE_HITS = re.compile(r"(prefix_cache_hits|cached_tokens)(_total)?$")

VERIFY_STEPS = re.compile(r"(spec_decode_num_drafts|kernarc_drafts)(_total)?$")

OnStarting = Callable[[float, str], None]  # seconds so far, the log's last line


@dataclass
class RunningEngine:
    """An engine that answers. process is None for one that we did not start."""

    build: Build
    base_url: str
    model_name: str
    ready_s: float
    process: EngineProcess | None = None
    headers: Mapping[str, str] | None = None

    def raise_if_dead(self, doing: str) -> None:
        """EngineError where it no longer runs or answers."""
        if self.process is None:
            if not responds(self.base_url, self.headers):
                raise EngineError(
                    f"{self.build.name} at {self.base_url} stopped answering {doing}", "is it still running?"
                )
        elif not answers(self.base_url, self.headers):
            self.process.wait(DYING_S)  # the connection breaks a moment before the exit code is known
            self.process.raise_if_dead(doing)
            raise EngineError(
                f"{self.build.name} runs but stopped answering {doing}\n{self.process.last_log_lines()}",
                f"the whole log is {self.process.log_path}",
            )

    def counters(self) -> dict[str, float]:
        """The cache and draft counters at /metrics, summed over labels; empty where there are none."""
        try:
            answer = _get(f"{server_root(self.base_url)}/metrics", self.headers)
        except requests.RequestException:
            return {}
        return parse_counters(answer.text) if answer.ok else {}

    def stop(self) -> None:
        """Ends the engine where it is ours."""
        if self.process is not None:
            self.process.stop()


class Engine(ABC):
    """How to start one kind of engine."""

    def __init__(self, build: Build, max_context: int) -> None:
        self.build = build
        self.max_context = max_context

    @abstractmethod
    def command(self, model: Path, port: int) -> list[str]:
        """The command line that serves `model` on 127.0.0.1:`port`."""

    def environment(self) -> dict[str, str]:
        """Variables on top of ours: the build's own, and its pythonpath before any other.

        Never the folder that we happen to be in: `python -m` would put it before them all.
        """
        inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # an empty entry is that folder
        search = {"PYTHONPATH": os.pathsep.join([*self.build.pythonpath, *inherited])}
        return {**search, **self.build.config.environment, **SAFE_PATH}

    @abstractmethod
    def version(self) -> str | None:
        """Of the installed engine; None where nobody can say."""

    def source_code(self) -> SourceCode | None:
        """The very code that it runs, where that is a package of ours."""
        return None

    def library_versions(self) -> dict[str, str]:
        """Of what it computes with, where that is not our own environment."""
        return {}

    def start(
        self, model: Path, log_path: Path, limits: LimitsConfig, on_starting: OnStarting | None = None
    ) -> RunningEngine:
        """Starts the engine and waits until it answers. EngineError where it ends first or takes too long."""
        for entry in self.build.pythonpath:
            if not Path(entry).exists():
                raise EngineError(
                    f"{self.build.name}: its code is no longer at {entry}", "measure again from its source"
                )
        for _ in range(PORT_TRIES - 1):
            try:
                return self._start_on(free_port(), model, log_path, limits, on_starting)
            except PortTakenError:  # between choosing it and the engine's binding it, which may be a minute
                continue
        return self._start_on(free_port(), model, log_path, limits, on_starting)

    def _start_on(
        self, port: int, model: Path, log_path: Path, limits: LimitsConfig, on_starting: OnStarting | None
    ) -> RunningEngine:
        started = time.monotonic()
        process = EngineProcess(self.build.name, self.command(model, port), self.environment(), log_path)
        try:
            base_url = f"http://127.0.0.1:{port}"
            self._wait(process, base_url, started, limits.start_s, on_starting)
            name = first_model(base_url)
            process.raise_unless_listening(port)
            return RunningEngine(self.build, base_url, name, time.monotonic() - started, process)
        except BaseException:
            process.stop()
            raise

    def _wait(
        self, process: EngineProcess, base_url: str, started: float, limit_s: float, on_starting: OnStarting | None
    ) -> None:
        while not answers(base_url):
            process.raise_if_dead("while starting")
            elapsed = time.monotonic() - started
            if elapsed > limit_s:
                raise EngineError(
                    f"{self.build.name} did not answer within {limit_s:g} s\n{process.last_log_lines()}",
                    f"raise limits.start_s if it only needs longer; the whole log is {process.log_path}",
                )
            if on_starting is not None:
                on_starting(elapsed, process.last_log_line())
            time.sleep(POLL_S)


def server_root(base_url: str) -> str:
    """The URL without a trailing /v1, where /health and /metrics live."""
    return base_url.rstrip("/").removesuffix("/v1")


def answers(base_url: str, headers: Mapping[str, str] | None = None) -> bool:
    """Whether the server lists its models, which none does before it can serve them."""
    try:
        return _get(f"{server_root(base_url)}/v1/models", headers).ok
    except requests.RequestException:
        return False


def responds(base_url: str, headers: Mapping[str, str] | None = None) -> bool:
    """Whether anything answers HTTP there, if only to say that it has no such path."""
    try:
        _get(f"{server_root(base_url)}/v1/models", headers)
    except requests.RequestException:
        return False
    return True


def first_model(base_url: str, headers: Mapping[str, str] | None = None) -> str:
    """The first model the server lists."""
    try:
        answer = _get(f"{server_root(base_url)}/v1/models", headers)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (requests.RequestException, ValueError, LookupError, TypeError) as error:
        raise EngineError(
            f"{base_url} lists no model at /v1/models: {error}", "name the model: endpoint:URL#MODEL_NAME"
        ) from error


def _get(url: str, headers: Mapping[str, str] | None) -> requests.Response:
    """Straight to the server, as the measuring client goes: a proxy of the environment is not for 127.0.0.1."""
    with requests.Session() as session:
        session.trust_env = False
        return session.get(url, headers=headers, timeout=ANSWER_S)


def parse_counters(text: str) -> dict[str, float]:
    """Prometheus text to the counters we record, each summed over its labels."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+\d+)?", line.strip())
        if match is None or not COUNTERS.search(match[1]) or match[1].endswith("_created"):
            continue
        try:
            totals[match[1]] = totals.get(match[1], 0.0) + float(match[2])
        except ValueError:
            continue
    return totals


def cache_hits(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Prompt tokens the server took from a cache between two readings of its counters."""
    return sum(value - before.get(name, 0.0) for name, value in after.items() if CACHE_HITS.search(name))


def verify_steps(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Steps with drafts that the server made between two readings; None where it does not count them."""
    counted = [value - before.get(name, 0.0) for name, value in after.items() if VERIFY_STEPS.search(name)]
    return sum(counted) if counted else None
