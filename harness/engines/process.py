"""An engine as a process of ours: started in a session of its own, logged to a file, stopped with its whole tree."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ..errors import EngineError
from . import supervisor

STOP_GRACE_S = 10.0
KILL_WAIT_S = 20.0
LAST_LOG_LINES = 15
_PORT_TAKEN = re.compile(r"address already in use|port \d+ on \S+ is in use", re.IGNORECASE)


class PortTakenError(EngineError):
    """The engine ended because another process listens on its port."""


class EngineProcess:
    """One running engine. Whatever ends this process, a small supervisor ends the engine and all it started."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.name = name
        self.command = tuple(command)
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            self._log_start = log.tell()
            self._supervisor = subprocess.Popen(
                [sys.executable, "-S", supervisor.__file__, str(STOP_GRACE_S), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=without_relative_folders({**os.environ, "PYTHONUNBUFFERED": "1", **environment}),
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._supervisor.poll()

    def wait(self, limit_s: float) -> None:
        """Returns when it has ended, or after the limit."""
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(limit_s)

    def raise_if_dead(self, doing: str) -> None:
        """EngineError with the exit code and the last log lines where the engine has ended.

        PortTakenError where it says that another listens on its port.
        """
        if self.exit_code is not None:
            is_taken = any(_PORT_TAKEN.search(line) for line in self._log_lines())
            raise (PortTakenError if is_taken else EngineError)(
                f"{self.name} ended {doing} with {describe_exit(self.exit_code)}\n{self.last_log_lines()}",
                f"the whole log is {self.log_path}",
            )

    def raise_unless_listening(self, port: int) -> None:
        """PortTakenError where what answers on the port is none of this engine's processes, as far as can be seen."""
        try:
            supervisor_process = psutil.Process(self._supervisor.pid)
            tree = [supervisor_process, *supervisor_process.children(recursive=True)]
            sockets = [each for process in tree for each in process.net_connections("tcp")]
        except psutil.AccessDenied:
            return
        except psutil.NoSuchProcess:
            sockets = []
        if not any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets):
            raise PortTakenError(
                f"what answers on port {port} is not {self.name}: another process took the port", "try again"
            )

    def pids(self) -> list[int]:
        """Of the engine and all it started."""
        try:
            return [child.pid for child in psutil.Process(self._supervisor.pid).children(recursive=True)]
        except psutil.Error:
            return []

    def last_log_lines(self, count: int = LAST_LOG_LINES) -> str:
        """The end of what the engine wrote since it was started, indented."""
        return "\n".join(f"  | {line[:300]}" for line in self._log_lines()[-count:]) or "  | (it wrote nothing)"

    def last_log_line(self) -> str:
        """What it said last; "" before it said anything."""
        return next(reversed(self._log_lines()), "")

    def _log_lines(self) -> list[str]:
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 65_536))
            lines = log.read().decode(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()]

    def stop(self) -> None:
        """Ends the engine and everything it started; returns when nothing of it runs. Safe to call again."""
        if self._supervisor.stdin is not None and not self._supervisor.stdin.closed:
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(STOP_GRACE_S + KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()  # the engine follows it: its parent-death signal is SIGKILL
            self._supervisor.wait()


def describe_exit(code: int) -> str:
    """ "exit code 137 (SIGKILL: killed, often for lack of memory)" and the like."""
    number = code - 128 if code > 128 else -code
    if code > 128 or code < 0:
        try:
            name = signal.Signals(number).name
        except ValueError:
            return f"exit code {code}"
        why = ": killed, often for lack of memory" if number == signal.SIGKILL else ""
        return f"exit code {code} ({name}{why})"
    return f"exit code {code}"


def without_relative_folders(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the XDG folders that are empty or relative: those are to be ignored, and vLLM makes them where it is."""
    return {
        name: value
        for name, value in environment.items()
        if not (name.startswith("XDG_") and name.endswith("_HOME")) or os.path.isabs(value)
    }


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
