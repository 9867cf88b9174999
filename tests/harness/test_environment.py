"""The machine is recorded as it is; what it may not have done to a stream is decided by rules fixed before."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernarc.harness import gpu as gpu_module
from kernarc.harness.config.models import VoidRulesConfig
from kernarc.harness.environment import git_state, read_environment, require_comparable, sample, void_reason
from kernarc.harness.errors import ConfigError
from kernarc.harness.gpu import THROTTLE_REASONS, Gpu
from kernarc.harness.run.records import EnvironmentSample, RunManifest

FOREIGN_PID = os.getppid()  # a process that exists and is not ours


class FakeNvml:
    """pynvml as far as we ask it; what a card does not support raises, as in the real one."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception): ...

    def __init__(self, *, reasons: int = 0, pids: tuple[int, ...] = (), supports_power: bool = True) -> None:
        self.reasons, self.pids, self.supports_power = reasons, pids, supports_power

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"gpu{index}"

    def nvmlDeviceGetName(self, _: object) -> bytes:  # noqa: N802
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, _: object) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=150_000_000_000, free=140_000_000_000)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: object) -> int:  # noqa: N802
        return self.reasons

    def nvmlDeviceGetPowerUsage(self, _: object) -> int:  # noqa: N802
        if not self.supports_power:
            raise self.NVMLError
        return 412_500

    def nvmlDeviceGetComputeRunningProcesses(self, _: object) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetClockInfo(self, _: object, clock: int) -> int:  # noqa: N802
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[clock]

    def nvmlDeviceGetTemperature(self, *_: object) -> int:  # noqa: N802
        return 43


def open_gpu(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> Gpu:
    monkeypatch.setattr(gpu_module.importlib, "import_module", lambda _: nvml)
    gpu = Gpu.open()
    assert gpu is not None
    return gpu


def test_a_gpu_is_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = open_gpu(monkeypatch, FakeNvml(reasons=0x40 | 0x4 | 0x1))
    environment = read_environment(gpu)
    assert (environment.gpu_name, environment.gpu_driver) == ("NVIDIA H200", "580.1")
    assert environment.gpu_memory_bytes == 150_000_000_000
    now = sample(gpu)
    assert (now.gpu_sm_clock_mhz, now.gpu_memory_clock_mhz, now.gpu_temperature_c) == (1980, 3201, 43)
    assert now.gpu_power_w == 412.5
    assert now.gpu_throttle_reasons == ("sw_power_cap", "hw_thermal_slowdown"), "being idle (0x1) slows nobody"


def test_what_a_card_does_not_say_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample(open_gpu(monkeypatch, FakeNvml(supports_power=False))).gpu_power_w is None


def test_foreign_processes_are_told_from_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        nvml = FakeNvml(pids=(os.getpid(), child.pid, FOREIGN_PID, 2**22 + 1))
        found = sample(open_gpu(monkeypatch, nvml)).gpu_foreign_processes
        child.kill()
    assert found == (f"pid {FOREIGN_PID}",), "ours, our children's and ids that are nobody here are left out"


def test_without_nvml_every_gpu_field_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_module(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(gpu_module.importlib, "import_module", no_module)
    assert Gpu.open() is None
    environment, now = read_environment(None), sample(None)
    assert (environment.gpu_name, environment.gpu_memory_bytes, now.gpu_sm_clock_mhz) == (None, None, None)
    assert environment.cpu_count == os.cpu_count()
    assert environment.memory_total_bytes > now.memory_available_bytes > 0
    assert "numpy" in environment.library_versions


def a_sample(**changes: object) -> EnvironmentSample:
    return EnvironmentSample(t_ns=0, cpu_load_1min=0.0, memory_available_bytes=1).model_copy(update=changes)


def test_throttling_voids_unless_the_rules_only_note_it() -> None:
    hot = a_sample(gpu_throttle_reasons=("hw_thermal_slowdown",))
    assert void_reason([a_sample(), hot], VoidRulesConfig()) == "the GPU was throttled: hw_thermal_slowdown"
    assert void_reason([a_sample(), hot], VoidRulesConfig(gpu_throttling="note")) is None
    assert void_reason([a_sample(), a_sample()], VoidRulesConfig()) is None
    capped = a_sample(gpu_throttle_reasons=("sw_power_cap",))
    assert void_reason([capped], VoidRulesConfig()) is None, "a card's ordinary limit"
    assert set(THROTTLE_REASONS) > {"sw_power_cap", "hw_thermal_slowdown"}


def test_a_foreign_process_voids_unless_the_rules_only_note_it() -> None:
    shared = a_sample(gpu_foreign_processes=("pid 7",))
    assert void_reason([shared], VoidRulesConfig()) == "another process used the GPU: pid 7"
    assert void_reason([shared], VoidRulesConfig(foreign_gpu_process="note")) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_tokens": 5}, "max_tokens differs: 4 and 5"),
        ({"requests_sha256": "1"}, "requests_sha256 differs: '0' and '1'"),
        ({"depths": (128, 256)}, "depths differs"),
    ],
)
def test_runs_that_differ_in_a_must_match_key_are_not_compared(
    changes: dict[str, object], said: str, manifest: RunManifest
) -> None:
    require_comparable(manifest, manifest)
    with pytest.raises(ConfigError) as refusal:
        require_comparable(manifest, manifest.model_copy(update=changes))
    assert said in refusal.value.message


def test_runs_of_two_machines_or_models_are_not_compared(manifest: RunManifest) -> None:
    other = manifest.environment.model_copy(update={"gpu_name": "A100"})
    with pytest.raises(ConfigError, match=r"environment\.gpu_name differs: None and 'A100'"):
        require_comparable(manifest, manifest.model_copy(update={"environment": other}))
    build = manifest.builds[0].model_copy(update={"model_sha256": "f00"})
    with pytest.raises(ConfigError, match=r"model hashes differs: \[\] and \['f00'\]"):
        require_comparable(manifest, manifest.model_copy(update={"builds": (build,)}))


def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)
    (tmp_path / ".git_archival.txt").write_text("$Format:%H$\n")  # as in a checkout that is none of git's any more
    assert git_state(tmp_path) == (None, None)
    (tmp_path / ".git_archival.txt").write_text("0123456789abcdef0123456789abcdef01234567\n")
    (tmp_path / "harness").mkdir()
    assert git_state(tmp_path / "harness") == ("0123456789abcdef0123456789abcdef01234567", None)
    for command in (
        ["init", "-q"],
        ["add", ".git_archival.txt"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-mx"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    commit, dirty = git_state(tmp_path)
    assert len(commit or "") == 40
    assert dirty is False
    (tmp_path / ".git_archival.txt").write_text("$Format:%H$\n")
    assert git_state(tmp_path) == (commit, True)


def test_what_git_does_not_track_has_no_commit(tmp_path: Path) -> None:
    """An environment inside a checkout holds other code than the checkout's."""
    (tmp_path / "package.py").touch()
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qmx"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    (tmp_path / ".venv" / "kernarc").mkdir(parents=True)
    (tmp_path / ".venv" / "kernarc" / "__init__.py").touch()
    assert git_state(tmp_path / ".venv" / "kernarc") == (None, None)
