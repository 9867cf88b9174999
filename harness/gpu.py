"""The GPU as NVML tells it; every answer is None or empty without one, and no answer is ever invented."""

import importlib
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import psutil

T = TypeVar("T")

# Reasons that make a card slower than it can be; idling and clocks set by the user do not.
# The power cap is a card's ordinary limit under load, met by every build alike: noted, never a fault.
ORDINARY_REASONS = ("sw_power_cap", "sync_boost")
THROTTLE_REASONS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
}


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment; None where the driver does not say."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle_reasons: tuple[str, ...]
    foreign_processes: tuple[str, ...]


class Gpu:
    """The first GPU that CUDA would use; open() gives None where there is no driver."""

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self._nvml = nvml
        self._handle = handle
        self.name = self._text(self._ask(nvml.nvmlDeviceGetName, handle))
        self.driver = self._text(self._ask(nvml.nvmlSystemGetDriverVersion))
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        self.memory_bytes: int | None = None if memory is None else int(memory.total)

    @classmethod
    def open(cls) -> "Gpu | None":
        """The GPU, through the optional nvidia-ml-py package."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            return cls(nvml, nvml.nvmlDeviceGetHandleByIndex(_first_visible()))
        except nvml.NVMLError:
            return None

    def free_bytes(self) -> int | None:
        """Memory that nobody uses now."""
        memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, self._handle)
        return None if memory is None else int(memory.free)

    def read(self, own_pids: Collection[int]) -> GpuReading:
        """Clocks, heat, power, why it is slowed, and processes on it that are not among own_pids."""
        nvml, handle = self._nvml, self._handle
        mask = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        # Inside a container NVML may tell the host's ids, which are nobody we could name: those are left out.
        others = {int(process.pid) for process in processes} - set(own_pids)
        foreign = sorted(pid for pid in others if psutil.pid_exists(pid))
        return GpuReading(
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if milliwatts is None else milliwatts / 1000,
            throttle_reasons=tuple(name for name, bit in THROTTLE_REASONS.items() if mask & bit),
            foreign_processes=tuple(f"pid {pid}" for pid in foreign),
        )

    def _ask(self, question: Callable[..., T], *arguments: object) -> T | None:
        with suppress(self._nvml.NVMLError):
            return question(*arguments)
        return None

    @staticmethod
    def _text(value: object) -> str | None:
        if value is None:
            return None
        return value.decode() if isinstance(value, bytes) else str(value)


def _first_visible() -> int:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return int(first) if first.isdigit() else 0
