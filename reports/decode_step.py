"""Section C–C: one decode step as measured — how long it takes, how many tokens it brings, where its time goes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..gates.output.check_file import read_document
from ..harness import format as fmt
from ..harness.errors import RecordError
from .saved import SavedRun, ok_streams
from .tables import Column, SpeedTable

PROFILE_NAME = "step_profile.json"
PROFILE_HINT = 'expected {"builds": {NAME: [{"depth": 128, "parts": [{"name": "GEMM", "ms": 5.1}]}]}}'


@dataclass(frozen=True)
class Part:
    """One piece of a step from the run's own breakdown."""

    name: str
    ms: float

    @property
    def label(self) -> str:
        """Its time."""
        return fmt.milliseconds(self.ms)


Profile = dict[tuple[str, int], list[Part]]  # (build, depth)


@dataclass(frozen=True)
class Step:
    """The median step of one build at one depth. width_percent: of the longest step on the sheet."""

    column: Column
    series: int
    step_ms: str
    tokens_per_step: str
    width_percent: str
    parts: tuple[Part, ...]
    reason: str | None

    @property
    def parts_ms(self) -> float:
        """What the breakdown accounts for."""
        return sum(part.ms for part in self.parts)

    def part_percent(self, part: Part) -> str:
        """A part's share of the bar."""
        return fmt.fixed(100 * part.ms / self.parts_ms, 2)


@dataclass(frozen=True)
class DepthSteps:
    """All builds at one depth."""

    depth: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Harvest:
    """How often a step of one build brought 1, 2, 3, … tokens, over all its counted streams."""

    column: Column
    series: int
    shares: tuple[tuple[int, str, str], ...]  # tokens, share in words, percent of the widest bar
    steps: str


@dataclass(frozen=True)
class Section:
    """The whole drawing."""

    depths: tuple[DepthSteps, ...]
    harvests: tuple[Harvest, ...]

    @property
    def has_parts(self) -> bool:
        """True where some run recorded where its step's time goes."""
        return any(step.parts for each in self.depths for step in each.steps)

    @property
    def has_steps(self) -> bool:
        """True where events of some build are known to be steps."""
        return any(step.reason is None for each in self.depths for step in each.steps)


def section(runs: Sequence[SavedRun], table: SpeedTable) -> Section:
    """Median steps by depth and the spread of tokens a step brought."""
    longest = max((cell.step_ms for cell in table.cells.values() if cell.step_ms is not None), default=1.0)
    profiles = [_profile(run) for run in runs]
    depths = []
    for depth in table.depths:
        steps = [
            _step(table, series, column, depth, longest, profiles[_run_index(column)])
            for series, column in enumerate(table.columns)
            if (column.key, depth) in table.cells
        ]
        depths.append(DepthSteps(fmt.count(depth), tuple(steps)))
    harvests = [
        harvest
        for series, column in enumerate(table.columns)
        if (harvest := _harvest(runs[_run_index(column)], table, column, series)) is not None
    ]
    return Section(tuple(depths), tuple(harvests))


def _run_index(column: Column) -> int:
    return int(column.key.split(":")[0])


def _step(
    table: SpeedTable,
    series: int,
    column: Column,
    depth: int,
    longest: float,
    profile: dict[tuple[str, int], list[Part]],
) -> Step:
    cell = table.cells[column.key, depth]
    reason = cell.void_reason
    if reason is None and cell.step_ms is None:
        reason = "this server's events are not known to be steps"
    return Step(
        column=column,
        series=series,
        step_ms=fmt.milliseconds(cell.step_ms),
        tokens_per_step=fmt.tokens_per_step(cell.tokens_per_step),
        width_percent=fmt.fixed(100 * (cell.step_ms or 0.0) / longest, 2),
        parts=tuple(profile.get((column.build.name, depth), ())) if reason is None else (),
        reason=reason,
    )


def _harvest(run: SavedRun, table: SpeedTable, column: Column, series: int) -> Harvest | None:
    counts: Counter[int] = Counter()
    for depth in table.depths:
        cell = table.cells.get((column.key, depth))
        if cell is None or cell.tpot is None:
            continue
        for stream in ok_streams(run.cell_streams(column.build.name, depth)):
            if stream.events_are_steps:
                counts.update(event.num_tokens for event in stream.events[1:])
    total = counts.total()
    if not total:
        return None
    most = max(counts.values())
    shares = tuple(
        (tokens, fmt.share(counts[tokens] / total), fmt.fixed(100 * counts[tokens] / most, 2))
        for tokens in range(1, max(counts) + 1)
    )
    return Harvest(column, series, shares, fmt.count(total))


def _profile(run: SavedRun) -> Profile:
    """step_profile.json of a run: `{"builds": {name: [{"depth": d, "parts": [{"name": …, "ms": …}]}]}}`."""
    path = run.path / PROFILE_NAME
    document = read_document(path)
    if document is None:
        return {}
    builds = document.get("builds")
    try:
        if not isinstance(builds, dict):
            raise TypeError("builds is not an object")
        return {
            (str(name), int(entry["depth"])): [Part(str(part["name"]), float(part["ms"])) for part in entry["parts"]]
            for name, entries in builds.items()
            for entry in entries
        }
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is not a step breakdown: {error}", PROFILE_HINT) from error
