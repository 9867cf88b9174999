"""What a person sees while a comparison runs: per depth the estimate and its interval closing in, and the time left."""

import time
from collections.abc import Iterator

import numpy as np
from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table

from ..harness.client.metrics import tpot_ms
from ..harness.run.progress import ProgressDisplay
from ..harness.run.records import StreamRecord, StreamStatus
from ..harness.run.run import Run
from .bootstrap import preview_interval
from .outcomes import GateOutcome
from .pairing import Pair

PREVIEW_EVERY_S = 2.0
PREVIEW_RESAMPLES = 1_000
EMPTY = "…"


class _ProgressUnderTable(Progress):
    """The harness's progress line with the estimates above it."""

    table: Table | None = None

    def get_renderables(self) -> Iterator[RenderableType]:
        if self.table is not None:
            yield self.table
        yield self.make_tasks_table(self.tasks)


class GateDisplay(ProgressDisplay):
    """Estimates after every launch, and within a launch a preview that knows nothing yet of launch luck."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self._gate_progress = _ProgressUnderTable(
            *self._progress.columns, console=self._console, transient=True, disable=not self._live
        )
        self._progress = self._gate_progress
        self._outcome: GateOutcome | None = None
        self._baseline, self._candidate = "", ""
        self._depths: tuple[int, ...] = ()
        self._this_launch: dict[tuple[str, str], StreamRecord] = {}
        self._last_preview_s = 0.0

    def begin_look(self, run: Run, launches: int) -> None:
        """From now on the time left is that until so many launches are measured."""
        first = self._task is None
        if first:
            self.begin(run)
            self._baseline, self._candidate = (build.name for build in run.plan.builds[:2])
            self._depths = run.plan.measurement.depths
        self._to_do = [slot for launch in range(launches) for slot in run.remaining(launch)]
        self._total = sum(len(run.schedule(launch)) for launch in range(launches))
        if self._task is not None:
            self._progress.update(self._task, total=self._total, completed=self._total - len(self._to_do))

    def launch_done(self, outcome: GateOutcome) -> None:
        """Shows the estimates of all launches so far."""
        self._outcome = outcome
        self._this_launch.clear()
        self._gate_progress.table = self._table()
        if not self._live:
            self.notify(f"after {outcome.launches} launches: {'; '.join(self._lines()) or 'no pair'}")

    def checking(self, done: int, total: int) -> None:
        """The output check at work."""
        if self._task is not None:
            self._progress.update(self._task, description=f"checking outputs: {done} of {total}", left="")

    def stream_done(self, stream: StreamRecord) -> None:
        super().stream_done(stream)
        self._this_launch[stream.build, stream.request_id] = stream
        if self._live and time.monotonic() - self._last_preview_s >= PREVIEW_EVERY_S:
            self._last_preview_s = time.monotonic()
            self._gate_progress.table = self._table()

    def _table(self) -> Table:
        table = Table(title=f"{self._candidate} against {self._baseline}: time per token", title_justify="left")
        table.add_column("depth", justify="right")
        for heading in ("all launches", "interval", "this launch", "preview"):
            table.add_column(heading, justify="right", min_width=12)
        rows = {depth.depth: depth for depth in self._outcome.depths} if self._outcome else {}
        for depth in self._depths:
            row = rows.get(depth)
            estimate = f"{row.point_estimate:+.2%}" if row else EMPTY
            bounds = _bounds(row.low, row.high) if row else EMPTY
            table.add_row(f"{depth:,}", estimate, bounds, *self._preview(depth))
        return table

    def _preview(self, depth: int) -> tuple[str, str]:
        ratios = []
        for (build, request_id), candidate in self._this_launch.items():
            baseline = self._this_launch.get((self._baseline, request_id))
            wanted = build == self._candidate and candidate.depth == depth
            if wanted and baseline is not None and _is_sound(candidate) and _is_sound(baseline):
                ratios.append(Pair(baseline, candidate).log_tpot_ratio)
        if not ratios:
            return EMPTY, EMPTY
        values = np.array(ratios)
        interval = preview_interval(values, 0.95, PREVIEW_RESAMPLES, seed=0)
        bounds = _bounds(*(float(np.expm1(bound)) for bound in interval)) if interval else EMPTY
        return f"{float(np.expm1(values.mean())):+.2%}", bounds

    def _lines(self) -> list[str]:
        depths = self._outcome.depths if self._outcome else ()
        return [f"{row.depth:,}: {row.point_estimate:+.2%} ({_bounds(row.low, row.high)})" for row in depths]


def _is_sound(stream: StreamRecord) -> bool:
    return stream.status is StreamStatus.OK and (tpot_ms(stream) or 0) > 0


def _bounds(low: float | None, high: float | None) -> str:
    return EMPTY if low is None or high is None else f"{low:+.2%} to {high:+.2%}"
