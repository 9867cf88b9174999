"""The decode-speed table as types: a cell has a speed only when its streams and its output check earned one."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from ..harness.client.metrics import step_ms, tokens_per_second, tokens_per_step, tpot_ms, ttft_ms
from ..harness.environment import require_comparable
from ..harness.errors import ConfigError, RecordError
from ..harness.run.completeness import how_to_continue
from ..harness.run.records import BuildRecord, RunManifest, StreamRecord, StreamStatus
from .estimates import Estimate, geometric_mean, median_estimate
from .saved import CheckState, SavedRun, ok_streams
from .speed_ups import SpeedUp, SpeedUps, derived, paired

NO_SPEED_UP = SpeedUp(None, is_derived=False)


@dataclass(frozen=True)
class Column:
    """One build of one run. key is unique in the table, label is what a reader sees."""

    key: str
    label: str
    run_id: str
    measured_on: str  # YYYY-MM-DD, UTC
    build: BuildRecord
    crowded_streams: int = 0  # measured while another resident engine was using the processor


@dataclass(frozen=True)
class SpeedCell:
    """One build at one depth: medians over requests, or the reason why there is none.

    tpot_ms and its estimate are None exactly when `void_reason` is set. is_checked: the output check passed.
    """

    column: Column
    depth: int
    streams: int
    void_streams: int
    void_reasons: tuple[str, ...]
    void_reason: str | None
    is_checked: bool
    tpot: Estimate | None = None
    step_ms: float | None = None
    tokens_per_step: float | None = None
    ttft_ms: float | None = None

    @property
    def tpot_ms(self) -> float | None:
        """Median time per output token."""
        return None if self.tpot is None else self.tpot.point_estimate

    @property
    def tokens_per_second(self) -> float | None:
        """1000 / median TPOT."""
        return None if self.tpot is None else tokens_per_second(self.tpot.point_estimate)

    @property
    def tokens_per_second_interval(self) -> tuple[float, float] | None:
        """The interval of the median TPOT turned over."""
        if self.tpot is None or self.tpot.low is None or self.tpot.high is None:
            return None
        return tokens_per_second(self.tpot.high), tokens_per_second(self.tpot.low)

    @property
    def tokens_per_second_reach(self) -> tuple[float, float]:
        """How far that interval goes below and above the speed; 0 where there is none."""
        if self.tokens_per_second is None or self.tokens_per_second_interval is None:
            return 0.0, 0.0
        low, high = self.tokens_per_second_interval
        return max(self.tokens_per_second - low, 0.0), max(high - self.tokens_per_second, 0.0)


@dataclass(frozen=True)
class GeometricMean:
    """A column over the depths at which every column has a speed."""

    column: Column
    tpot_ms: float
    tokens_per_second: float


@dataclass(frozen=True)
class SpeedTable:
    """Everything table, chart and page print. The first column is the baseline."""

    columns: tuple[Column, ...]
    depths: tuple[int, ...]
    cells: dict[tuple[str, int], SpeedCell]  # (column key, depth)
    speed_ups: dict[tuple[str, int | None], SpeedUp]  # (column key, depth or None for the geometric mean)
    geometric_means: dict[str, GeometricMean]
    geometric_mean_depths: tuple[int, ...]

    @property
    def baseline(self) -> Column:
        """The column every speed-up refers to."""
        return self.columns[0]

    @property
    def candidates(self) -> tuple[Column, ...]:
        """The other columns."""
        return self.columns[1:]

    @property
    def subject(self) -> Column:
        """Who the sheet is about: the first candidate, or the one build there is."""
        return self.columns[min(1, len(self.columns) - 1)]

    @property
    def has_overlapping_intervals(self) -> bool:
        """True where two columns' intervals overlap at some depth: a chart then draws them side by side."""
        shown = [(cell, cell.tokens_per_second_interval) for cell in self.cells.values()]
        return any(
            one.depth == other.depth and first[0] <= second[1] and second[0] <= first[1]
            for (one, first), (other, second) in combinations(shown, 2)
            if first is not None and second is not None
        )

    @property
    def highest_speed(self) -> float | None:
        """The top of the highest interval, or of the highest median; None where nothing has a speed."""
        speeds = [cell.tokens_per_second for cell in self.cells.values() if cell.tokens_per_second is not None]
        ends = [each[1] for cell in self.cells.values() if (each := cell.tokens_per_second_interval) is not None]
        return max([*speeds, *ends], default=None)

    def without_speed(self, depth: int) -> str:
        """Who has no speed at a depth, for a chart: "", "no speed" (nobody has), or "no speed: a, b"."""
        labels = [cell.column.label for cell in self.cells.values() if cell.depth == depth and cell.tpot is None]
        if not labels:
            return ""
        return "no speed" if len(labels) == len(self.columns) else f"no speed: {', '.join(labels)}"

    @property
    def has_derived(self) -> bool:
        """True where some speed-up compares two sessions."""
        return any(each.is_derived and each.ratio is not None for each in self.speed_ups.values())

    @property
    def is_checked(self) -> bool:
        """True where every shown speed passed the output check."""
        return all(cell.is_checked for cell in self.cells.values() if cell.tpot is not None)


def speed_table(runs: Sequence[SavedRun], *, require_check: bool = True) -> SpeedTable:
    """The table of one or several runs; the first run's first build is the baseline.

    require_check: a cell whose outputs nobody checked shows no speed (a publication). A failed check never does.
    """
    if not runs or not any(run.manifest.builds for run in runs):
        raise RecordError("there is no build to report", "name a run directory written by `kernarc-gate bench`")
    sources = list(_columns(runs))
    columns = tuple(column for column, _ in sources)
    depths = tuple(sorted({depth for run in runs for depth in run.manifest.depths}))
    cells = {
        (column.key, depth): _speed_cell(run, column, depth, require_check)
        for column, run in sources
        for depth in depths
        if depth in run.manifest.depths
    }
    common = tuple(depth for depth in depths if all(_has_speed(cells, column, depth) for column in columns))
    means = {column.key: _geometric_mean(cells, column, common) for column in columns} if common else {}
    speed_ups: dict[tuple[str, int | None], SpeedUp] = {}
    for column, run in sources[1:]:
        found = _speed_ups(sources[0], (column, run), cells)
        speed_ups |= {(column.key, depth): found.by_depth.get(depth, NO_SPEED_UP) for depth in depths}
        over_all = found if tuple(sorted(found.by_depth)) == common else None
        speed_ups[column.key, None] = over_all.geometric_mean if over_all else NO_SPEED_UP
    return SpeedTable(columns, depths, cells, speed_ups, means, common)


def _speed_ups(
    baseline: tuple[Column, SavedRun], candidate: tuple[Column, SavedRun], cells: dict[tuple[str, int], SpeedCell]
) -> SpeedUps:
    tpots = [
        {cell.depth: cell.tpot_ms for cell in cells.values() if cell.column is column and cell.tpot_ms is not None}
        for column, _ in (baseline, candidate)
    ]
    if baseline[1] is not candidate[1]:
        return derived(*tpots, refusal=incomparable(baseline[1].manifest, candidate[1].manifest))
    both = sorted(tpots[0].keys() & tpots[1].keys())
    return paired(baseline[1], baseline[0].build.name, candidate[0].build.name, both)


def _columns(runs: Sequence[SavedRun]) -> Iterable[tuple[Column, SavedRun]]:
    names = Counter(build.name for run in runs for build in run.manifest.builds)
    for index, run in enumerate(runs):
        for build in run.manifest.builds:
            day = run.manifest.created_utc[:10]
            label = build.name if names[build.name] == 1 else f"{build.name} ({run.manifest.run_id})"
            crowded = sum(each.crowded_streams for each in run.manifest.launch_records if each.build == build.name)
            yield Column(f"{index}:{build.name}", label, run.manifest.run_id, day, build, crowded), run


def _speed_cell(run: SavedRun, column: Column, depth: int, require_check: bool) -> SpeedCell:
    streams = run.cell_streams(column.build.name, depth)
    counted = ok_streams(streams)
    void_reason = why_void(run, column.build.name, depth, require_check=require_check)
    tpot = _median(counted, tpot_ms)
    if void_reason is None and tpot is None:
        void_reason = "no stream has two events with tokens"
    return SpeedCell(
        column=column,
        depth=depth,
        streams=len(streams),
        void_streams=len(streams) - len(counted),
        void_reasons=void_reasons(streams),
        void_reason=void_reason,
        is_checked=run.output_check(column.build.name).state is CheckState.PASSED,
        tpot=tpot if void_reason is None else None,
        step_ms=_point(counted, step_ms) if void_reason is None else None,
        tokens_per_step=_point(counted, tokens_per_step) if void_reason is None else None,
        ttft_ms=_point(counted, ttft_ms) if void_reason is None else None,
    )


def _by_launch(
    streams: Iterable[StreamRecord], metric: Callable[[StreamRecord], float | None]
) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for stream in streams:
        value = metric(stream)
        if value is not None:
            values.setdefault(stream.launch, []).append(value)
    return values


def _median(streams: Iterable[StreamRecord], metric: Callable[[StreamRecord], float | None]) -> Estimate | None:
    return median_estimate(_by_launch(streams, metric))


def _point(streams: Iterable[StreamRecord], metric: Callable[[StreamRecord], float | None]) -> float | None:
    estimate = _median(streams, metric)
    return None if estimate is None else estimate.point_estimate


def _has_speed(cells: dict[tuple[str, int], SpeedCell], column: Column, depth: int) -> bool:
    cell = cells.get((column.key, depth))
    return cell is not None and cell.tpot is not None


def _geometric_mean(cells: dict[tuple[str, int], SpeedCell], column: Column, depths: Sequence[int]) -> GeometricMean:
    tpots = [cell.tpot_ms for depth in depths if (cell := cells[column.key, depth]).tpot_ms is not None]
    mean = geometric_mean(tpots)
    return GeometricMean(column, mean, tokens_per_second(mean))


def why_void(run: SavedRun, build: str, depth: int, *, require_check: bool) -> str | None:
    """The first reason that takes this cell's speed; None where it has one.

    require_check: outputs that nobody checked are a reason (a publication). A failed check always is.
    """
    streams = run.cell_streams(build, depth)
    reasons = void_reasons(streams)
    void = sum(stream.status is StreamStatus.VOID for stream in streams)
    planned = run.manifest.requests_per_depth * len(run.begun_launches)
    expected = planned - run.excluded_streams(build, depth)
    if not streams:
        return "not measured"
    if void > run.manifest.max_void_streams_per_cell:
        return f"{void} of {len(streams)} streams void: {'; '.join(reasons)}"
    if len(streams) < expected:
        return f"{len(streams)} of {expected} streams recorded: {how_to_continue(run.manifest.kind, 'RUN_DIR')}"
    check = run.output_check(build)
    refused = {CheckState.FAILED, CheckState.MISSING} if require_check else {CheckState.FAILED}
    return check.reason if check.state in refused else None


def void_reasons(streams: Sequence[StreamRecord]) -> tuple[str, ...]:
    """Each different reason of the void streams once."""
    void = (stream for stream in streams if stream.status is StreamStatus.VOID)
    return tuple(sorted({stream.void_reason or "no reason recorded" for stream in void}))


def incomparable(first: RunManifest, second: RunManifest) -> str | None:
    """Why the speeds of two runs may not be set against each other; None where they may."""
    try:
        require_comparable(first, second)
    except ConfigError as error:
        return error.message
    return None
