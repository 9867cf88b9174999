"""Whatever ends a writer, what it had finished can be read again."""

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from kernarc.harness.errors import ConfigError, RecordError
from kernarc.harness.run.records import LaunchRecord, RunManifest, StreamRecord, StreamStatus
from kernarc.harness.run.storage import Request, RunDirectory, StorageError

MakeStream = Callable[..., StreamRecord]


@pytest.fixture
def run(tmp_path: Path, manifest: RunManifest) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create(manifest)


def test_what_is_written_is_read_back(run: RunDirectory, manifest: RunManifest, stream: MakeStream) -> None:
    first, second = stream("d128-l0-r0"), stream("d128-l0-r1", status=StreamStatus.VOID, void_reason="stalled")
    run.append(first)
    run.append(second)
    run.append_requests([Request(request_id="d128-l0-r0", depth=3, launch=0, prompt_ids=(1, 2, 3))])
    reopened = RunDirectory(run.path)
    assert reopened.manifest() == manifest
    assert reopened.streams() == [first, second]
    assert reopened.requests()["d128-l0-r0"].prompt_ids == (1, 2, 3)


def test_a_folder_with_a_run_is_not_overwritten(run: RunDirectory, manifest: RunManifest) -> None:
    with pytest.raises(ConfigError, match="already holds a run") as refusal:
        RunDirectory(run.path).create(manifest)
    assert "--resume" in refusal.value.hint


def test_updates_are_checked(run: RunDirectory) -> None:
    assert run.update_manifest(finished_utc="2026-01-02").finished_utc == "2026-01-02"
    with pytest.raises(ValueError, match="finnished"):
        run.update_manifest(finnished_utc="2026-01-02")
    assert run.manifest().finished_utc == "2026-01-02"


@pytest.mark.parametrize("tail", [b'{"build": "a", "dep', b"\x00\x00\x00\x00\n", b'{"whole": "but without newline"}'])
def test_a_torn_last_line_is_ignored_then_set_aside(run: RunDirectory, stream: MakeStream, tail: bytes) -> None:
    run.append(stream("d128-l0-r0"))
    with run.streams_path.open("ab") as file:
        file.write(tail)
    before = run.streams_path.read_bytes()
    reopened = RunDirectory(run.path)
    assert [s.request_id for s in reopened.streams()] == ["d128-l0-r0"]
    assert run.streams_path.read_bytes() == before, "reading changes nothing"
    reopened.append(stream("d128-l0-r1"))
    assert [s.request_id for s in RunDirectory(run.path).streams()] == ["d128-l0-r0", "d128-l0-r1"]
    kept = json.loads(run.torn_path.read_text())
    assert kept["text"].encode() == tail
    assert "torn last line" in kept["reason"]


def test_a_damaged_line_in_the_middle_is_named(run: RunDirectory, stream: MakeStream) -> None:
    run.append(stream("d128-l0-r0"))
    with run.streams_path.open("ab") as file:
        file.write(b'{"nonsense": 1}\n')
    RunDirectory(run.path).append(stream("d128-l0-r1"))
    with pytest.raises(RecordError, match=r"streams\.jsonl, line 2: "):
        run.streams()


def test_a_void_launch_voids_its_streams(run: RunDirectory, stream: MakeStream) -> None:
    run.append(stream("d128-l0-r0"))
    run.append(stream("d128-l1-r0", launch=1))
    launch = LaunchRecord(build="a", launch=0, ready_s=1.0, void_reason="prefix cache hits: 3")
    run.update_manifest(launch_records=(launch,))
    void, ok = run.streams()
    assert (void.status, void.void_reason) == (StreamStatus.VOID, "prefix cache hits: 3")
    assert ok.status is StreamStatus.OK


def test_a_folder_without_a_run_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not a run directory"):
        RunDirectory(tmp_path / "nothing").manifest()


def test_a_manifest_of_another_version_is_refused(run: RunDirectory) -> None:
    content = json.loads(run.manifest_path.read_text()) | {"schema_version": 99}
    run.manifest_path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match="schema_version 99"):
        run.manifest()


def test_one_writer_at_a_time(run: RunDirectory) -> None:
    second = RunDirectory(run.path).lock()
    with run.lock(), pytest.raises(ConfigError, match=f"being measured by process {os.getpid()}"):
        second.__enter__()
    assert not run.was_killed()


def _hold_lock(path: Path, ready: "multiprocessing.synchronize.Event") -> None:
    with RunDirectory(path).lock():
        ready.set()
        signal.pause()


def test_a_killed_writer_leaves_a_trace_and_no_lock(run: RunDirectory) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold_lock, args=(run.path, ready))
    process.start()
    assert ready.wait(30)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert run.was_killed()
    with run.lock():
        pass
    assert not run.was_killed()


def test_a_full_disk_loses_nothing(small_disk: Path, manifest: RunManifest, stream: MakeStream) -> None:
    run = RunDirectory(small_disk / "run").create(manifest)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))  # bites only where the small disk could not be mounted
    recorded: list[str] = []

    def record_until_full() -> None:
        while True:
            run.append(stream(f"d128-l0-r{len(recorded)}"))
            recorded.append(f"d128-l0-r{len(recorded)}")

    try:
        with pytest.raises(StorageError, match="no space left") as refusal:
            record_until_full()
        with pytest.raises(StorageError, match="no space left"):
            run.append_requests([Request(request_id="x", depth=1, launch=0, prompt_ids=tuple(range(100_000)))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "--resume" in refusal.value.hint
    assert refusal.value.exit_code == 4
    assert len(recorded) > 50
    reopened = RunDirectory(run.path)
    assert reopened.manifest() == manifest
    assert [s.request_id for s in reopened.streams()] == recorded
