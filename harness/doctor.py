"""What this machine can and cannot do, each finding with its next step."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from .caches import cache_folder
from .config.checkpoints import Checkpoint, checkpoint_size
from .engines.vllm_install import INSTALL_HINT, find_installation
from .environment import read_environment, sample
from .gpu import Gpu

GIB = 2**30
RUN_BYTES = GIB // 2  # what a long run's records need, generously
WANTED_CLOCK_NS = 1_000
CPU_BYTES_PER_WEIGHT = 4  # the CPU path computes in fp32
GPU_OVERHEAD = 1.15
BUSY_SHARE = 0.25
BUSY_WINDOW_S = 0.5


class State(StrEnum):
    """fine: as it should be. note: works, with less. bad: measurements here would be void or impossible."""

    FINE = "fine"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. next_step is empty where there is nothing to do."""

    name: str
    state: State
    detail: str
    next_step: str = ""


def examine(model: Path | None = None, run_folder: Path = Path()) -> Iterator[Finding]:
    """Everything, in about a second. model: a checkpoint directory whose fit is asked for."""
    gpu = Gpu.open()
    yield from _processor()
    yield _foreign_load()
    yield _clock()
    yield from _graphics(gpu)
    yield from _memory(model, gpu)
    yield _disk("disk for runs", run_folder.resolve(), RUN_BYTES)
    yield _disk("disk for engines and models", cache_folder(), 8 * GIB)
    yield _vllm()
    yield _loopback()
    yield _git()


def _processor() -> Iterator[Finding]:
    machine = read_environment(None)
    yield Finding("processor", State.FINE, f"{machine.cpu_model}, {machine.cpu_count} cores")
    if machine.cpu_governor not in (None, "performance"):
        step = "sudo cpupower frequency-set -g performance"
        yield Finding("CPU governor", State.NOTE, f"{machine.cpu_governor}: clocks move while you measure", step)


def _foreign_load() -> Finding:
    share = psutil.cpu_percent(BUSY_WINDOW_S) / 100
    detail = f"{share:.0%} of the processor is busy, load {os.getloadavg()[0]:.1f}"
    if share <= BUSY_SHARE:
        return Finding("other load", State.FINE, detail)
    busiest = sorted(_busy_processes(), reverse=True)[:3]
    names = ", ".join(f"{name} ({percent:.0f} %)" for percent, name in busiest)
    return Finding(
        "other load", State.NOTE, f"{detail}: {names}", "end what you do not need; CPU builds slow down with it"
    )


def _busy_processes() -> Iterator[tuple[float, str]]:
    processes = list(psutil.process_iter(["name"]))
    for process in processes:
        _percent(process)
    time.sleep(BUSY_WINDOW_S)
    for process in processes:
        if process.pid != os.getpid():
            yield _percent(process), f"{process.info['name']} [{process.pid}]"


def _percent(process: psutil.Process) -> float:
    try:
        return float(process.cpu_percent())
    except psutil.Error:
        return 0.0  # it ended while we looked


def _clock() -> Finding:
    steps = []
    for _ in range(1000):
        before = after = time.perf_counter_ns()
        while after == before:
            after = time.perf_counter_ns()
        steps.append(after - before)
    smallest = min(steps)
    detail = f"{time.get_clock_info('perf_counter').implementation}, steps of {smallest} ns"
    if smallest <= WANTED_CLOCK_NS:
        return Finding("clock", State.FINE, detail, "`kernarc-gate selftest` measures the whole client")
    return Finding("clock", State.BAD, detail, "the clock is too coarse to time tokens: check the kernel's clocksource")


def _graphics(gpu: Gpu | None) -> Iterator[Finding]:
    if gpu is None:
        if (
            shutil.which("nvidia-smi")
            and subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
        ):
            step = "pip install 'kernarc-gate[gpu]'"
            yield Finding("GPU", State.NOTE, "there is a driver, but NVML cannot be read: clocks go unrecorded", step)
        else:
            yield Finding("GPU", State.NOTE, "none: everything runs on the CPU, with the small checkpoint")
        return
    memory = f"{gpu.memory_bytes / GIB:.0f} GiB" if gpu.memory_bytes else "memory unknown"
    yield Finding("GPU", State.FINE, f"{gpu.name}, {memory}, driver {gpu.driver}")
    now = sample(gpu)
    if now.gpu_foreign_processes:
        step = "end them: a measurement beside them is void"
        yield Finding("other GPU processes", State.BAD, ", ".join(now.gpu_foreign_processes), step)
    if now.gpu_throttle_reasons:
        step = "let it cool, or look at its power limit (nvidia-smi -q -d PERFORMANCE)"
        yield Finding("GPU clocks", State.NOTE, f"slowed now: {', '.join(now.gpu_throttle_reasons)}", step)


def _memory(model: Path | None, gpu: Gpu | None) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding("memory", State.FINE, f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available")
    if model is None:
        return
    size = checkpoint_size(model)
    free = gpu.free_bytes() if gpu else memory.available
    needed = round(size.stored_bytes * GPU_OVERHEAD) if gpu else size.weights * CPU_BYTES_PER_WEIGHT
    place = "GPU memory" if gpu else "memory"
    tokenizer = "with" if Checkpoint(model).tokenizer_json else "without"
    detail = f"{_count(size.weights)} weights, {_size(size.stored_bytes)} stored, {tokenizer} a tokenizer"
    if free is not None and needed > free:
        step = "use a smaller model, or a machine with more memory"
        yield Finding(f"model {model}", State.BAD, f"{detail}; needs about {_size(needed)} of {place}", step)
    else:
        fits_twice = free is not None and 2 * needed <= free
        together = "" if fits_twice else "two builds only one after the other: residency: alternate"
        yield Finding(f"model {model}", State.FINE, f"{detail}; fits in {place} ({_size(needed)})", together)


def _count(weights: int) -> str:
    for size, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if weights >= size:
            return f"{weights / size:.3g} {name}"
    return str(weights)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.1f} MiB"


def _disk(name: str, folder: Path, wanted: int) -> Finding:
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    detail = f"{free / GIB:.1f} GiB free at {place}"
    if not os.access(place, os.W_OK):
        return Finding(name, State.BAD, f"{place} is not writable", "choose another --out, or set XDG_CACHE_HOME")
    if free < wanted:
        return Finding(name, State.NOTE, detail, f"free some space: {wanted / GIB:.1f} GiB are wanted")
    return Finding(name, State.FINE, detail)


def _vllm() -> Finding:
    installation = find_installation()
    if installation is None:
        return Finding("vLLM", State.NOTE, "not installed: builds are compared without it", INSTALL_HINT)
    detail = f"{installation.distribution} {installation.version} in {installation.folder}"
    return Finding("vLLM", State.FINE, detail, "`kernarc-gate engines check vllm` starts it")


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2):
            return Finding("loopback", State.FINE, "127.0.0.1 takes connections")
    except OSError as error:
        return Finding(
            "loopback", State.BAD, f"127.0.0.1 takes no connections: {error}", "engines cannot be reached here"
        )


def _git() -> Finding:
    if shutil.which("git"):
        return Finding("git", State.FINE, "found: git:REF builds work")
    return Finding("git", State.NOTE, "not found", "install git for git:REF builds")
