"""Whatever ends a run, resuming completes it: the same requests in the same order, nothing lost, the ending noted."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from kernarc.harness.config.builds import Build
from kernarc.harness.config.models import MeasurementConfig
from kernarc.harness.errors import ConfigError, EngineError, RecordError
from kernarc.harness.run.plan import RunPlan
from kernarc.harness.run.records import StreamRecord, StreamStatus
from kernarc.harness.run.run import Run
from kernarc.harness.run.storage import RunDirectory, StorageError

MakeBuild = Callable[..., Build]
FindProcesses = Callable[[str], list[int]]


def make_plan(*builds: Build, launches: int = 2) -> RunPlan:
    config = MeasurementConfig(depths=(20, 40), requests_per_depth=3, max_tokens=9, seed=3)
    return RunPlan.of("bench", "test", config, builds, launches)


def measured(run: Run | RunDirectory) -> list[StreamRecord]:
    directory = run.directory if isinstance(run, Run) else run
    return [stream for stream in directory.streams() if not stream.is_warmup]


def assert_complete(run: Run, kept: list[StreamRecord]) -> None:
    """Every slot of the schedule once, in its order; what was kept is untouched; the prompts are the plan's."""
    streams = measured(run)
    slots = [(launch, slot) for launch in range(run.plan.launches) for slot in run.schedule(launch)]
    assert [(s.launch, s.slot, s.build, s.request_id) for s in streams] == [
        (launch, slot.order, slot.build, slot.request_id) for launch, slot in slots
    ]
    assert streams[: len(kept)] == kept
    assert all(stream.status is StreamStatus.OK for stream in streams)
    uninterrupted = Run.create(run.plan, run.directory.path.with_name("uninterrupted"))
    assert uninterrupted.directory.manifest().requests_sha256 == run.directory.manifest().requests_sha256
    assert run.directory.manifest().finished_utc is not None
    assert run.is_finished


MEASURE = """
    import sys
    from kernarc.harness.run.plan import RunPlan
    from kernarc.harness.run.run import Run
    from kernarc.harness.run.interrupts import sigterm_as_interrupt
    with sigterm_as_interrupt():
        Run.create(RunPlan.model_validate_json(sys.argv[1]), sys.argv[2]).measure()
"""


def start_measuring(plan: RunPlan, out: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), plan.model_dump_json(), str(out)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def wait_for(condition: Callable[[], bool], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


REASONS = {signal.SIGKILL: "killed", signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
ENDINGS = [(signal.SIGKILL, lines) for lines in (0, 3, 7, 17)] + [(signal.SIGINT, lines) for lines in (0, 3, 17)]


@pytest.mark.parametrize(
    ("ending", "after_lines"), [*ENDINGS, (signal.SIGTERM, 7)], ids=lambda value: getattr(value, "name", str(value))
)
def test_the_client_is_ended(
    ending: signal.Signals, after_lines: int, fake_build: MakeBuild, tmp_path: Path, processes_with: FindProcesses
) -> None:
    marker = f"marker-{uuid.uuid4().hex}"
    plan = make_plan(fake_build("a", "--marker", marker, "--step-ms", "5"), fake_build("b", "--marker", marker))
    client = start_measuring(plan, tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    wait_for(lambda: directory.manifest_path.exists() and lines_in(directory.streams_path) >= after_lines)
    if after_lines == 0:
        wait_for(lambda: bool(processes_with(marker)))
    client.send_signal(ending)
    client.wait(30)
    wait_for(lambda: not [pid for pid in processes_with(marker) if pid != client.pid])

    kept = measured(directory)
    run = Run.resume(tmp_path / "run")
    (interruption,) = run.directory.manifest().interruptions
    assert interruption.streams_done == len(kept)
    assert REASONS[ending] in interruption.reason
    run.measure()
    assert_complete(run, kept)


def test_a_torn_last_line_is_measured_again(fake_build: MakeBuild, tmp_path: Path) -> None:
    run = Run.create(make_plan(fake_build("a"), fake_build("b")), tmp_path / "run")
    run.measure_launch(0)
    content = run.directory.streams_path.read_bytes()
    run.directory.streams_path.write_bytes(content[:-40])
    resumed = Run.resume(tmp_path / "run")
    kept = measured(resumed)
    assert len(kept) == 11
    resumed.measure()
    assert_complete(resumed, kept)
    assert "torn last line of streams.jsonl" in resumed.directory.torn_path.read_text()


def test_the_engine_is_killed(fake_build: MakeBuild, tmp_path: Path) -> None:
    died = tmp_path / "died"
    plan = make_plan(fake_build("a"), fake_build("b", "--die-at-request", "5", "--die-once", str(died)))
    run = Run.create(plan, tmp_path / "run")
    with pytest.raises(EngineError, match="exit code 42"):
        run.measure()
    kept = measured(run)
    assert 0 < len(kept) < 12
    resumed = Run.resume(tmp_path / "run")
    resumed.measure()
    assert_complete(resumed, kept)
    (interruption,) = resumed.directory.manifest().interruptions
    assert interruption.streams_done == len(kept)


def test_the_disk_is_full(fake_build: MakeBuild, tmp_path: Path) -> None:
    run = Run.create(make_plan(fake_build("a"), fake_build("b")), tmp_path / "run")
    run.measure_launch(0)
    kept = measured(run)
    limit = run.directory.streams_path.stat().st_size + 3000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(StorageError, match="no space left to write"):
            run.measure()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    more = measured(run)
    assert more[: len(kept)] == kept
    resumed = Run.resume(tmp_path / "run")
    (interruption,) = resumed.directory.manifest().interruptions
    assert "no space left" in interruption.reason or "disk full" in interruption.reason
    assert interruption.streams_done == len(more)
    resumed.measure()
    assert_complete(resumed, more)


def test_a_second_ending_while_resuming(fake_build: MakeBuild, tmp_path: Path) -> None:
    died = tmp_path / "died"
    plan = make_plan(fake_build("a", "--die-at-request", "3", "--die-once", str(died)))
    run = Run.create(plan, tmp_path / "run")
    with pytest.raises(EngineError):
        run.measure()
    died.unlink()
    run = Run.resume(tmp_path / "run")
    with pytest.raises(EngineError):
        run.measure()
    run = Run.resume(tmp_path / "run")
    run.measure()
    assert_complete(run, [])
    assert [entry.streams_done for entry in run.directory.manifest().interruptions] == [1, 2]


def test_a_run_that_another_process_measures_is_left_alone(fake_build: MakeBuild, tmp_path: Path) -> None:
    client = start_measuring(make_plan(fake_build("a", "--step-ms", "300")), tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    try:
        wait_for(directory.lock_path.exists)
        wait_for(lambda: directory.lock_path.read_text() != "")
        with pytest.raises(ConfigError, match=f"is being measured by process {client.pid}"):
            Run.resume(tmp_path / "run")
    finally:
        os.kill(client.pid, signal.SIGINT)
        client.wait(30)


def test_another_model_is_refused(fake_build: MakeBuild, fake_model: Path, tmp_path: Path) -> None:
    Run.create(make_plan(fake_build("a")), tmp_path / "run")
    (fake_model / "weights").write_text("new")
    with pytest.raises(ConfigError, match="no longer the model that a was measured with"):
        Run.resume(tmp_path / "run")
    (fake_model / "weights").unlink()
    (fake_model / "config.json").write_text('{"vocab_size": 50}')
    with pytest.raises(ConfigError, match="its prompts came from random ids below 90"):
        Run.resume(tmp_path / "run")


def test_what_is_no_run_cannot_be_resumed(fake_build: MakeBuild, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not a run directory"):
        Run.resume(tmp_path)
    Run.create(make_plan(fake_build("a")), tmp_path / "run")
    (tmp_path / "run" / "plan.json").unlink()
    with pytest.raises(RecordError, match="not a run's plan"):
        Run.resume(tmp_path / "run")
