"""Ctrl-C, SIGTERM and SIGHUP at every system call of a write: what could be read before can be read after.

The interrupt is raised inside the call itself, before and after what it does, so no test here waits for anything.
"""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernarc.harness.run import storage
from kernarc.harness.run.interrupts import INTERRUPTS, interrupts_after, sigterm_as_interrupt
from kernarc.harness.run.records import RunManifest, StreamRecord
from kernarc.harness.run.storage import Request, RunDirectory, StorageError

MakeStream = Callable[..., StreamRecord]


class Interrupted:
    """`os`, and files, that send this process a signal at the n-th call of the writer, before or after doing it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, at: int, after: bool) -> None:
        self.calls: list[str] = []
        self._number, self._at, self._after = number, at, after
        monkeypatch.setattr(
            storage,
            "os",
            SimpleNamespace(
                SEEK_END=os.SEEK_END,
                getpid=os.getpid,
                write=self._wrap("write", lambda descriptor, data: os.write(descriptor, data[:50])),
                fsync=self._wrap("fsync", os.fsync),
            ),
        )
        monkeypatch.setattr(Path, "open", self._wrap("open", Path.open))
        monkeypatch.setattr(Path, "replace", self._wrap("replace", Path.replace))
        monkeypatch.setattr(Path, "unlink", self._wrap("unlink", Path.unlink))

    def _wrap(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **named: object) -> object:
            if name == "open" and (len(arguments) < 2 or arguments[1] in ("r", "rb")):
                return call(*arguments, **named)  # reading changes nothing, so no write has begun
            is_now = len(self.calls) == self._at
            self.calls.append(name)
            if is_now and not self._after:
                signal.raise_signal(self._number)
            result = call(*arguments, **named)
            if is_now and self._after:
                signal.raise_signal(self._number)
            return result

        return wrapped


def _append(run: RunDirectory, stream: MakeStream) -> None:
    run.append(stream("d128-l0-r1"))


def _append_requests(run: RunDirectory, _: MakeStream) -> None:
    run.append_requests([Request(request_id="d128-l0-r1", depth=3, launch=0, prompt_ids=(1, 2, 3))])


def _update_manifest(run: RunDirectory, _: MakeStream) -> None:
    run.update_manifest(finished_utc="2026-01-02")


def _write_verdict(run: RunDirectory, _: MakeStream) -> None:
    run.write_document("verdict.json", json.dumps({"verdict": "PASS"}))


def _set_torn_aside(run: RunDirectory, _: MakeStream) -> None:
    descriptor = os.open(run.streams_path, os.O_WRONLY | os.O_APPEND)  # not by what the test interrupts
    os.write(descriptor, b'{"build": "a", "dep')
    os.close(descriptor)
    RunDirectory(run.path).set_aside_torn_lines()


WRITES = (_append, _append_requests, _update_manifest, _write_verdict, _set_torn_aside)


def _contents(run: RunDirectory) -> dict[str, object]:
    """Everything of a run that a reader sees."""
    reopened = RunDirectory(run.path)
    verdict = run.path / "verdict.json"
    return {
        "streams": reopened.streams(),
        "requests": reopened.requests(),
        "manifest": reopened.manifest(),
        "verdict": json.loads(verdict.read_text()) if verdict.exists() else None,
        "torn": [json.loads(line)["text"] for line in run.torn_path.read_text().splitlines()]
        if run.torn_path.exists()
        else [],
    }


def _new_run(path: Path, manifest: RunManifest, stream: MakeStream) -> RunDirectory:
    run = RunDirectory(path).create(manifest)
    run.append(stream("d128-l0-r0"))
    run.append_requests([Request(request_id="d128-l0-r0", depth=3, launch=0, prompt_ids=(3, 2, 1))])
    run.write_document("verdict.json", json.dumps({"verdict": "VOID"}))
    return run


@pytest.mark.parametrize("number", INTERRUPTS, ids=lambda number: number.name)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__.strip("_"))
def test_an_interrupt_at_any_call_of_a_write_takes_effect_after_it(
    write: Callable[[RunDirectory, MakeStream], None],
    number: signal.Signals,
    tmp_path: Path,
    manifest: RunManifest,
    stream: MakeStream,
) -> None:
    undisturbed = _new_run(tmp_path / "undisturbed", manifest, stream)
    write(undisturbed, stream)
    at, calls = 0, 1
    while at < calls:
        for after in (False, True):
            run = _new_run(tmp_path / f"run-{at}-{after}", manifest, stream)
            with pytest.MonkeyPatch.context() as patch, sigterm_as_interrupt():
                writer = Interrupted(patch, number, at, after)
                with pytest.raises(KeyboardInterrupt):
                    write(run, stream)
            assert _contents(run) == _contents(undisturbed), f"{number.name} {'after' if after else 'before'} call {at}"
            calls = len(writer.calls)
        at += 1
    assert calls >= 3, "the writer's own calls were seen"


def test_a_failed_write_still_restores_the_file(
    tmp_path: Path, manifest: RunManifest, stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _new_run(tmp_path / "run", manifest, stream)
    before = run.streams_path.read_bytes()

    def refuse(descriptor: int) -> None:
        signal.raise_signal(signal.SIGINT)  # and an interrupt comes on top of it
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage.os, "fsync", refuse)
    with pytest.raises((StorageError, KeyboardInterrupt)):
        run.append(stream("d128-l0-r1"))
    assert run.streams_path.read_bytes() == before


def test_the_first_of_several_interrupts_is_the_reason_and_handlers_come_back() -> None:
    handlers = [signal.getsignal(number) for number in INTERRUPTS]
    done = []

    def twice() -> None:
        with interrupts_after():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            done.append("the block went on")

    with sigterm_as_interrupt(), pytest.raises(KeyboardInterrupt, match="SIGHUP"):
        twice()
    assert done == ["the block went on"]
    assert [signal.getsignal(number) for number in INTERRUPTS] == handlers


def test_blocks_inside_blocks_wait_for_the_outer_one() -> None:
    done = []

    def nested() -> None:
        with interrupts_after():
            with interrupts_after():
                signal.raise_signal(signal.SIGINT)
            done.append("the outer block went on")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert done == ["the outer block went on"]


def test_an_interrupt_while_handlers_come_back_is_not_the_last_that_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = signal.signal
    real = [signal.getsignal(number) for number in INTERRUPTS]

    def interrupted_once(number: int, handler: object) -> object:
        if handler is real[0]:
            monkeypatch.setattr(signal, "signal", restore)
            signal.raise_signal(signal.SIGINT)
        return restore(number, handler)  # type: ignore[arg-type]

    with sigterm_as_interrupt():
        try:
            with pytest.raises(KeyboardInterrupt), interrupts_after():
                monkeypatch.setattr(signal, "signal", interrupted_once)
            for number in INTERRUPTS:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(number)
        finally:
            for number, handler in zip(INTERRUPTS, real, strict=True):
                restore(number, handler)


def test_other_threads_write_without_handlers(tmp_path: Path, manifest: RunManifest, stream: MakeStream) -> None:
    run = _new_run(tmp_path / "run", manifest, stream)
    thread = threading.Thread(target=run.append, args=(stream("d128-l0-r1"),))
    thread.start()
    thread.join()
    assert [record.request_id for record in run.streams()] == ["d128-l0-r0", "d128-l0-r1"]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_that_has_no_handler_of_pythons_keeps_what_it_has(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with interrupts_after():
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
