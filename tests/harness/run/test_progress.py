"""The time left comes from what was seen; a display runs no thread while a stream is read."""

import io
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kernarc.harness.config.builds import Build
from kernarc.harness.config.models import MeasurementConfig
from kernarc.harness.run.plan import RunPlan
from kernarc.harness.run.progress import ProgressDisplay, TimeLeft
from kernarc.harness.run.records import StreamRecord
from kernarc.harness.run.run import Run
from kernarc.harness.run.schedule import Slot
from rich.console import Console

MakeStream = Callable[..., StreamRecord]


def slots(*wanted: tuple[str, int]) -> list[Slot]:
    return [Slot(n, 0, build, depth, f"r{n}") for n, (build, depth) in enumerate(wanted)]


def test_time_left_is_the_mean_of_the_same_build_and_depth(stream: MakeStream) -> None:
    time_left = TimeLeft()
    assert time_left.seconds([]) == 0
    assert time_left.seconds(slots(("a", 128))) is None
    for seconds in (2, 4):
        time_left.add(stream(build="a", depth=128, sent_ns=0, ended_ns=seconds * 10**9))
    time_left.add(stream(build="b", depth=128, sent_ns=0, ended_ns=10 * 10**9))
    assert time_left.seconds(slots(("a", 128), ("a", 128), ("b", 128))) == pytest.approx(3 + 3 + 10)


def test_a_build_that_was_not_seen_at_a_depth_takes_as_long_as_another(stream: MakeStream) -> None:
    time_left = TimeLeft()
    for build, seconds in (("a", 2), ("b", 5)):
        time_left.add(stream(build=build, depth=128, sent_ns=0, ended_ns=seconds * 10**9))
    assert time_left.seconds(slots(("c", 128), ("a", 128))) == pytest.approx(5 + 2)


def test_nothing_is_said_of_a_depth_that_was_not_seen(stream: MakeStream) -> None:
    """An engine's first request, which compiled for 18 s at 128 tokens, once promised hours for 65,536."""
    time_left = TimeLeft()
    time_left.add(stream(build="a", depth=128, sent_ns=0, ended_ns=18 * 10**9))
    assert time_left.seconds(slots(("a", 128), ("a", 65536))) is None


def test_a_warm_up_counts_until_a_stream_was_measured(stream: MakeStream) -> None:
    time_left = TimeLeft()
    time_left.add(stream(build="a", depth=128, is_warmup=True, sent_ns=0, ended_ns=18 * 10**9))
    assert time_left.seconds(slots(("a", 128))) == pytest.approx(18)
    time_left.add(stream(build="a", depth=128, sent_ns=0, ended_ns=10**9))
    assert time_left.seconds(slots(("a", 128))) == pytest.approx(1)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_display_shows_what_happens_without_a_thread(
    is_terminal: bool, fake_build: Callable[..., Build], tmp_path: Path
) -> None:
    output = io.StringIO()
    before = set(threading.enumerate())  # other tests' threads may still be there
    threads: set[threading.Thread] = set()

    class Display(ProgressDisplay):
        def stream_done(self, stream: StreamRecord) -> None:
            super().stream_done(stream)
            threads.update(threading.enumerate())

    config = MeasurementConfig(depths=(20,), requests_per_depth=2, max_tokens=9)
    plan = RunPlan.of("bench", "test", config, [fake_build("a")], 1)
    with Display(Console(file=output, force_terminal=is_terminal, width=200, color_system=None)) as display:
        run = Run.create(plan, tmp_path / "run", display)
        display.begin(run)
        run.measure()
    assert threads
    assert threads <= before
    shown = output.getvalue()
    assert f"run directory: {tmp_path / 'run'}" in shown.replace("\n", "")
    assert "launch 0: a is ready after" in shown
    assert ("a at 20" in shown) == is_terminal
