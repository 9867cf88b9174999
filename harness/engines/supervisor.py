"""Runs one engine and outlives nobody: when the measuring process goes, however it goes, the engine's whole tree goes.

Started by path with the standard library alone: `python supervisor.py GRACE_SECONDS COMMAND…`, standard input a pipe
that the measuring process holds open. End of file on it, or the engine's own end, stops every process of the tree.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
FAILED_TO_START = 127


def main(grace_s: float, command: list[str]) -> int:
    """Returns the engine's exit code, 128 + signal number where a signal ended it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the engine become ours, so that none is lost sight of
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the pipe says when to stop
    wake, alarm = os.pipe()
    os.set_blocking(alarm, False)
    signal.set_wakeup_fd(alarm)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        engine = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _prepare_engine(libc),
        )
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error}\n")
        return FAILED_TO_START
    while engine.poll() is None:
        ready, _, _ = select.select([sys.stdin.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
            break
    _stop_tree(engine, grace_s)
    return engine.returncode if engine.returncode >= 0 else 128 - engine.returncode


def _prepare_engine(libc: ctypes.CDLL) -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # should the supervisor itself be killed
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _stop_tree(engine: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Asks the engine to end, waits for it, then kills whatever is left of its tree."""
    if engine.poll() is None:
        _signal_group(engine.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while engine.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    _signal_group(engine.pid, signal.SIGKILL)
    engine.wait()
    while left := _descendants(os.getpid()):
        for pid in left:
            _kill(pid)
        _reap()
        time.sleep(0.01)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it ended while we looked
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    front = [root]
    while front:
        front = [child for parent in front for child in children.get(parent, [])]
        found += front
    return found


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
