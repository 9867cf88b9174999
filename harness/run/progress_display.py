"""What a run tells, on standard error: a live line with the time left on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .progress import RunObserver, TimeLeft
from .records import StreamRecord, StreamStatus
from .run import Run
from .schedule import Slot

PLAIN_EVERY_S = 30.0


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

    def begin(self, run: Run) -> None:
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
