"""Compiles the C++ beside this file once a machine, and says why where it cannot."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..errors import DecoderError

log = logging.getLogger("kernarc.decoder")

SOURCES = ("api.cpp", "buffers.cpp", "engine.cpp", "layers.cpp", "measure.cpp", "micro.cpp", "mtp.cpp")
# march=native: the library never leaves the machine (its name holds the CPU's flags). No contraction: every fused
# multiply-add is written out, so that a row's arithmetic is the same in every specialisation. No -ffast-math: sums keep
# their order, NaN stays NaN.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno"),
    *("-pthread", "-shared", "-fPIC", "-fvisibility=hidden"),
)
COMPILERS = ("g++", "clang++", "c++")
COMPILE_LIMIT_S = 300


class NativeUnavailableError(DecoderError):
    """There is no compiler, or the sources do not compile here."""


def library_path() -> Path:
    """The compiled library, compiling it where this machine has none yet. Raises NativeUnavailableError."""
    compiler = find_compiler()
    version = _output([*compiler, "--version"])
    key = hashlib.sha256("\0".join([*FLAGS, *compiler, version, _cpu_flags()]).encode())
    folder = Path(__file__).parent
    for file in sorted([*folder.glob("*.h"), *folder.glob("*.cpp")]):
        key.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    path = _cache_folder() / f"{key.hexdigest()[:32]}.so"
    if not path.exists():
        _compile(compiler, [str(folder / source) for source in SOURCES], path)
    return path


def find_compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, else the first one on PATH. Raises NativeUnavailableError."""
    given = shlex.split(os.environ.get("CXX", ""))
    if given:
        if shutil.which(given[0]) is None:
            raise NativeUnavailableError(f"CXX names {given[0]!r}, which is not on PATH", "install it or unset CXX")
        return given
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise NativeUnavailableError("there is no C++ compiler on PATH", "install g++ for a faster CPU path")


def compiler_version() -> str:
    """The compiler's first line about itself. Raises NativeUnavailableError."""
    return _output([*find_compiler(), "--version"]).partition("\n")[0]


def _compile(compiler: list[str], sources: list[str], path: Path) -> None:
    """Into a file of our own, then renamed: another process sees all of it or nothing, and whoever is last wins."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    except OSError as error:
        raise NativeUnavailableError(
            f"{path.parent} cannot be written: {error.strerror}", "set XDG_CACHE_HOME"
        ) from None
    os.close(handle)
    log.info("compiling the CPU decoder with %s, once for this machine", compiler[0])
    try:
        _output([*compiler, *FLAGS, *sources, "-o", temporary])
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{shlex.join(command)} did not run: {error}") from None
    if done.returncode:
        first_error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:])
        raise NativeUnavailableError(f"{shlex.join(command)} failed with exit code {done.returncode}: {first_error}")
    return done.stdout


def _cpu_flags() -> str:
    """What march=native stands for here."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "kernarc" / "native"
