"""What a run tells while it measures, how long it will still take, and both on standard error.

A terminal gets a live line with the time left, everything else plain lines.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .records import StreamRecord, StreamStatus
from .schedule import Slot

if TYPE_CHECKING:
    from .run import Run

PLAIN_EVERY_S = 30.0


class RunObserver:
    """Told of everything that happens; does nothing. Override what you show."""

    def notify(self, message: str) -> None:
        """One line about something slow or unusual."""

    def launch_begins(self, launch: int, slots: list[Slot]) -> None:
        """The streams of this launch that are still to be measured, in order."""

    def engine_starting(self, build: str, launch: int, elapsed_s: float, log_line: str) -> None:
        """Several times a second while an engine starts; log_line is the last it wrote."""

    def engine_ready(self, build: str, launch: int, ready_s: float) -> None:
        """It answers."""

    def warming_up(self, build: str, launch: int, depth: int) -> None:
        """Before each warm-up request."""

    def stream_begins(self, slot: Slot, launch: int) -> None:
        """Before each measured stream. Nothing of an observer may run while the stream is read: no thread, no timer."""

    def stream_done(self, stream: StreamRecord) -> None:
        """After each measured stream, recorded already."""


class TimeLeft:
    """Estimates the time that slots will take from the streams seen so far, by build and depth."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._warm_ups: dict[tuple[str, int], list[float]] = defaultdict(list)

    def add(self, stream: StreamRecord) -> None:
        """Learns from a finished stream."""
        seen = self._warm_ups if stream.is_warmup else self._measured
        seen[stream.build, stream.depth].append((stream.ended_ns - stream.sent_ns) / 1e9)

    def seconds(self, slots: Iterable[Slot]) -> float | None:
        """For these slots; None until some stream of the depth has been seen for each."""
        total = 0.0
        for slot in slots:
            estimate = self._one(slot)
            if estimate is None:
                return None
            total += estimate
        return total

    def _one(self, slot: Slot) -> float | None:
        """The mean of the build's streams at the depth, or what the slowest other build takes there.

        A warm-up, in which an engine may compile for minutes, counts only until a stream was measured. From one depth
        nothing follows for another: a prompt takes neither the same time nor one in proportion.
        """
        for seen in (self._measured, self._warm_ups):
            if same := seen.get((slot.build, slot.depth)):
                return sum(same) / len(same)
        others = [
            sum(seconds) / len(seconds)
            for seen in (self._measured, self._warm_ups)
            for (_, depth), seconds in seen.items()
            if depth == slot.depth
        ]
        return max(others, default=None)


class ProgressDisplay(RunObserver):
    """Shows launches, engines and streams as they come."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            disable=not self._live,
            auto_refresh=False,  # no thread of ours may run while a stream is read
        )
        self._task: TaskID | None = None
        self._time_left = TimeLeft()
        self._to_do: list[Slot] = []
        self._total = 0
        self._last_plain_s = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, run: "Run") -> None:
        """Before anything is measured: the run's directory and everything that is still to do."""
        self._to_do = [slot for launch in range(run.plan.launches) for slot in run.remaining(launch)]
        self._total = sum(len(run.schedule(launch)) for launch in range(run.plan.launches))
        for stream in run.directory.streams():
            self._time_left.add(stream)
        self.notify(f"run directory: {run.directory.path}")
        done = self._total - len(self._to_do)
        self._task = self._progress.add_task("starting", total=self._total, completed=done, left="")

    def notify(self, message: str) -> None:
        self._console.print(message, markup=False, soft_wrap=True)

    def engine_starting(self, build: str, launch: int, elapsed_s: float, log_line: str) -> None:
        self._say(f"launch {launch}: starting {build}, {elapsed_s:.0f} s", f"({log_line[:60]})" if log_line else "")

    def engine_ready(self, build: str, launch: int, ready_s: float) -> None:
        self.notify(f"launch {launch}: {build} is ready after {ready_s:.1f} s")

    def warming_up(self, build: str, launch: int, depth: int) -> None:
        self._say(f"launch {launch}: warming up {build} at {depth:,}", self._left())

    def stream_begins(self, slot: Slot, launch: int) -> None:
        self._say(f"launch {launch}: {slot.build} at {slot.depth:,}", self._left())

    def stream_done(self, stream: StreamRecord) -> None:
        self._time_left.add(stream)
        self._to_do = self._to_do[1:]
        if stream.status is StreamStatus.VOID:
            self.notify(f"void: {stream.build} {stream.request_id}: {stream.void_reason}")
        if self._task is not None:
            self._progress.advance(self._task)

    def _left(self) -> str:
        seconds = self._time_left.seconds(self._to_do)
        return "" if not seconds else f"about {_duration(seconds)} left"

    def _say(self, what: str, left: str) -> None:
        if self._live:
            if self._task is not None:
                self._progress.update(self._task, description=what, left=left, refresh=True)
        elif time.monotonic() - self._last_plain_s >= PLAIN_EVERY_S:
            self._last_plain_s = time.monotonic()
            done = self._total - len(self._to_do)
            self.notify(f"{done} of {self._total} streams; {what} {left}".rstrip())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
