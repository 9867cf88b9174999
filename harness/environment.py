"""The machine and the software of a run, and samples of the machine while it runs."""

import os
import platform
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil

from .. import __version__
from .config.models import VoidRulesConfig
from .errors import ConfigError
from .gpu import ORDINARY_REASONS, Gpu
from .run.records import Environment, EnvironmentSample, RunManifest

COMMIT = re.compile("[0-9a-f]{40,64}")
LIBRARIES = ("torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "pydantic", "nvidia-ml-py")
# Fields of the environment in which two runs may not differ if their speeds are to be compared.
MUST_MATCH_ENVIRONMENT = ("cpu_model", "cpu_count", "cpu_governor", "gpu_name", "gpu_driver", "gpu_memory_bytes")
MUST_MATCH_RUN = ("depths", "max_tokens", "requests_sha256", "prompt_source")


def read_environment(gpu: Gpu | None) -> Environment:
    """The machine as it is now."""
    commit, dirty = git_state(Path(__file__).parent)
    return Environment(
        hostname=socket.gethostname(),
        platform=platform.platform(),
        cpu_model=_cpu_model(),
        cpu_count=os.cpu_count() or 1,
        cpu_governor=_cpu_governor(),
        memory_total_bytes=psutil.virtual_memory().total,
        gpu_name=gpu.name if gpu else None,
        gpu_driver=gpu.driver if gpu else None,
        gpu_memory_bytes=gpu.memory_bytes if gpu else None,
        python_version=platform.python_version(),
        library_versions=own_library_versions(),
        kernarc_version=__version__,
        git_commit=commit,
        git_dirty=dirty,
    )


def sample(gpu: Gpu | None) -> EnvironmentSample:
    """The machine at this moment. Taken between streams only: a sample costs a millisecond or two."""
    reading = gpu.read(_own_pids()) if gpu else None
    return EnvironmentSample(
        t_ns=time.perf_counter_ns(),
        cpu_load_1min=os.getloadavg()[0],
        memory_available_bytes=psutil.virtual_memory().available,
        gpu_sm_clock_mhz=reading.sm_clock_mhz if reading else None,
        gpu_memory_clock_mhz=reading.memory_clock_mhz if reading else None,
        gpu_temperature_c=reading.temperature_c if reading else None,
        gpu_power_w=reading.power_w if reading else None,
        gpu_throttle_reasons=reading.throttle_reasons if reading else (),
        gpu_foreign_processes=reading.foreign_processes if reading else (),
    )


def void_reason(samples: Sequence[EnvironmentSample], rules: VoidRulesConfig) -> str | None:
    """Why a stream between these samples may not be used, by the rules decided before the run; None where it may."""
    throttled = sorted({reason for each in samples for reason in each.gpu_throttle_reasons} - set(ORDINARY_REASONS))
    foreign = sorted({process for each in samples for process in each.gpu_foreign_processes})
    if throttled and rules.gpu_throttling == "void":
        return f"the GPU was throttled: {', '.join(throttled)}"
    if foreign and rules.foreign_gpu_process == "void":
        return f"another process used the GPU: {', '.join(foreign)}"
    return None


def require_comparable(first: RunManifest, second: RunManifest) -> None:
    """Refuses to compare the speeds of two runs that differ in a must-match key, naming the key and both values."""
    keys = [(key, getattr(first, key), getattr(second, key)) for key in MUST_MATCH_RUN]
    keys += [
        (f"environment.{key}", getattr(first.environment, key), getattr(second.environment, key))
        for key in MUST_MATCH_ENVIRONMENT
    ]
    keys.append(("model hashes", _model_hashes(first), _model_hashes(second)))
    for key, ours, theirs in keys:
        if ours != theirs:
            raise ConfigError(
                f"runs {first.run_id} and {second.run_id} cannot be compared: {key} differs: {ours!r} and {theirs!r}",
                "measure both builds in one run (`kernarc-gate bench --builds A,B`)",
            )


def own_library_versions() -> dict[str, str]:
    """Of the libraries that this process would compute with."""
    return {name: version for name in LIBRARIES if (version := _version(name)) is not None}


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """(commit, whether anything differs from it) of the checkout that holds a folder; (None, None) outside one.

    A folder of which git tracks nothing (an environment inside a checkout) has no commit. What `git archive` packed
    says its commit itself, and nobody can tell whether it was changed since.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or not _git(folder, "ls-files"):
        return _archived_commit(folder), None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return (None, None) if status is None else (commit, bool(status))


def _archived_commit(folder: Path) -> str | None:
    """Of .git_archival.txt, which `git archive` fills in (.gitattributes)."""
    for parent in (folder, *folder.parents):
        try:
            text = (parent / ".git_archival.txt").read_text(encoding="utf-8").strip()
        except OSError:
            continue
        return text if COMMIT.fullmatch(text) else None
    return None


def _git(folder: Path, *arguments: str) -> str | None:
    # A hook or CI step may point git elsewhere by GIT_DIR and the like.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _model_hashes(manifest: RunManifest) -> list[str]:
    return sorted({build.model_sha256 for build in manifest.builds if build.model_sha256 is not None})


def _own_pids() -> set[int]:
    """This process and everything it started; engines are among them, however they fork."""
    return {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _cpu_governor() -> str | None:
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
