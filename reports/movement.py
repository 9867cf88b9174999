"""What moved between two publications, build by build and depth by depth. Two sessions: derived, never a verdict."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from ..harness import format as fmt
from . import frames
from .frames import Row, settled
from .saved import SavedRun
from .tables import SpeedCell, SpeedTable, incomparable
from .titleblock import drawing_number

HEADERS = ("Context", "Build", "ms/token before", "ms/token now", "change", "ms/step", "tokens/step", "")
WORDS = ("Build", "")  # the other columns hold numbers
APART, WITHIN = "intervals apart", "within the intervals"


@dataclass(frozen=True)
class Movement:
    """One build at one depth in both publications. Changes are fractions of the former value (+0.02: 2 % more)."""

    depth: int
    build: str
    before: SpeedCell
    now: SpeedCell
    may_compare: bool

    @property
    def tpot_change(self) -> float | None:
        """Of ms/token: above zero is slower."""
        return self._change(self.before.tpot_ms, self.now.tpot_ms)

    @property
    def step_change(self) -> float | None:
        """Of ms/step."""
        return self._change(self.before.step_ms, self.now.step_ms)

    @property
    def tokens_per_step_change(self) -> float | None:
        """Of tokens/step."""
        return self._change(self.before.tokens_per_step, self.now.tokens_per_step)

    @property
    def words(self) -> str:
        """Whether the two medians' intervals overlap; the reason where a speed is missing."""
        reason = self.before.void_reason or self.now.void_reason
        if reason is not None:
            return f"no speed: {reason}"
        before, now = self.before.tpot, self.now.tpot
        if not self.may_compare or before is None or now is None:
            return ""
        if before.low is None or before.high is None or now.low is None or now.high is None:
            return ""
        return WITHIN if before.low <= now.high and now.low <= before.high else APART

    def _change(self, before: float | None, now: float | None) -> float | None:
        return now / before - 1 if self.may_compare and before and now else None


@dataclass(frozen=True)
class Revision:
    """Two publications side by side. refusal: why their speeds may not be compared; then no change is given."""

    former_number: str
    former_date: str
    movements: tuple[Movement, ...]
    refusal: str | None
    gone: tuple[str, ...]  # builds of the former publication that this one lacks


def revision_since(
    former: tuple[Sequence[SavedRun], SpeedTable], present: tuple[Sequence[SavedRun], SpeedTable]
) -> Revision:
    """Pairs builds by name; the first column of a name counts."""
    refusals = [
        reason
        for before in former[0]
        for now in present[0]
        if (reason := incomparable(before.manifest, now.manifest)) is not None
    ]
    refusal = refusals[0] if refusals else None
    movements = tuple(_movements(former[1], present[1], refusal is None))
    names = {column.build.name for column in present[1].columns}
    gone = tuple(column.label for column in former[1].columns if column.build.name not in names)
    date = max(run.manifest.created_utc[:10] for run in former[0])
    return Revision(drawing_number(former[0]), date, movements, refusal, gone)


def rows(revision: Revision) -> list[tuple[str, ...]]:
    """The printed table under HEADERS."""
    return [
        (
            fmt.count(movement.depth),
            movement.build,
            fmt.milliseconds(movement.before.tpot_ms),
            fmt.milliseconds(movement.now.tpot_ms),
            fmt.percent(movement.tpot_change),
            fmt.percent(movement.step_change),
            fmt.percent(movement.tokens_per_step_change),
            movement.words,
        )
        for movement in revision.movements
    ]


def notes(revision: Revision) -> list[str]:
    """What the changes are and are not."""
    lines = [f"Compared with drawing {revision.former_number} of {revision.former_date}."]
    if revision.refusal is not None:
        lines.append(f"No change is given: {revision.refusal}.")
    else:
        lines.append(
            "Changes are between sessions, not paired; below zero in ms/token is faster. "
            "`kernarc-gate compare` decides."
        )
    if revision.gone:
        lines.append(f"No longer measured: {', '.join(revision.gone)}.")
    return lines


def terminal_table(revision: Revision) -> Table:
    """For a rich console."""
    view = frames.terminal_table(HEADERS, words=WORDS)
    for row in rows(revision):
        view.add_row(*(Text(text) for text in row))
    return view


def markdown(revision: Revision) -> str:
    """moved.md."""
    return frames.markdown(HEADERS, rows(revision), notes(revision), words=WORDS)


def documents(revision: Revision) -> list[Row]:
    """Flat rows for JSON; changes as fractions."""
    return [
        {
            "depth": movement.depth,
            "build": movement.build,
            "tpot_ms_before": settled(movement.before.tpot_ms),
            "tpot_ms": settled(movement.now.tpot_ms),
            "tpot_change": settled(movement.tpot_change),
            "step_change": settled(movement.step_change),
            "tokens_per_step_change": settled(movement.tokens_per_step_change),
            "words": movement.words,
        }
        for movement in revision.movements
    ]


def document(revision: Revision) -> dict[str, object]:
    """moved.json."""
    return {"since": revision.former_number, "refusal": revision.refusal, "moved": documents(revision)}


def _movements(former: SpeedTable, present: SpeedTable, may_compare: bool) -> Iterator[Movement]:
    before = {column.build.name: column for column in reversed(former.columns)}
    for depth in present.depths:
        for column in present.columns:
            match = before.get(column.build.name)
            if match is None or (match.key, depth) not in former.cells or (column.key, depth) not in present.cells:
                continue
            cells = former.cells[match.key, depth], present.cells[column.key, depth]
            yield Movement(depth, column.label, *cells, may_compare)
