"""A finished run as reports read it: manifest, measured streams in a fixed order, what the gate left beside them."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from ..gates.compare import Measured, control_report
from ..gates.config import GateConfig
from ..gates.control import NO_CONTROL, ControlReport
from ..gates.outcomes import OutputOutcome, Verdict
from ..gates.output.check_file import counting_outcomes, read_document
from ..harness.config.yaml_files import parse
from ..harness.run.completeness import begun_launches, complete_launches, why_unfinished
from ..harness.run.records import RunManifest, StreamRecord, StreamStatus
from ..harness.run.storage import RunDirectory


class CheckState(StrEnum):
    """What the output check said about the streams behind a number."""

    PASSED = "passed"
    FAILED = "failed"
    MISSING = "missing"


@dataclass(frozen=True)
class CheckResult:
    """The output check of one build, with the reason where it did not pass."""

    state: CheckState
    reason: str | None = None
    outcome: OutputOutcome | None = None


NOT_CHECKED = CheckResult(CheckState.MISSING, "outputs not checked: run `kernarc-gate check RUN_DIR`")


@dataclass(frozen=True)
class SavedRun:
    """One run directory, read once. streams: the measured ones, sorted, so that record order reaches no rendering.

    begun_launches: those whose streams are due. why_unfinished: in words; None where the run came to its end.
    """

    path: Path
    manifest: RunManifest
    streams: tuple[StreamRecord, ...]
    begun_launches: frozenset[int]
    why_unfinished: str | None

    @classmethod
    def load(cls, path: Path) -> "SavedRun":
        """Reads manifest and streams; RecordError where they are not records."""
        directory = RunDirectory(path)
        manifest, streams = directory.manifest(), directory.streams()
        unfinished = why_unfinished(directory, manifest)
        begun = begun_launches(manifest, streams, directory.requests().values() if unfinished else ())
        measured = (stream for stream in streams if not stream.is_warmup)
        return cls(path, manifest, tuple(sorted(measured, key=_fixed_order)), begun, unfinished)

    @property
    def complete_launches(self) -> int:
        """How many launches of every build were measured to their end."""
        return complete_launches(self.manifest, self.streams)

    def cell_streams(self, build: str, depth: int) -> tuple[StreamRecord, ...]:
        """The measured streams of one build at one depth, void ones included, less the blocks that a control voided."""
        return self._by_cell.get((build, depth), ())

    def excluded_streams(self, build: str, depth: int) -> int:
        """How many streams of a cell lie in blocks that a control voided."""
        return sum(
            stream.build == build and stream.depth == depth and self._is_excluded(stream) for stream in self.streams
        )

    @cached_property
    def control(self) -> ControlReport:
        """What a gate's control build voided, judged as the gate does; nothing in a run without one."""
        if self.manifest.kind != "compare" or len(self.manifest.builds) < 3:
            return NO_CONTROL
        config = parse(self.manifest.config_yaml, GateConfig, f"{self.path}/manifest.json: config_yaml")
        return control_report(Measured(self.manifest, self.streams, self._launches), config)

    @property
    def _launches(self) -> int:
        """Until a gate's run is finished its manifest holds the limit."""
        return self.manifest.launches if self.why_unfinished is None else self.complete_launches

    def _is_excluded(self, stream: StreamRecord) -> bool:
        return (stream.launch, stream.block) in self.control.void_blocks

    def output_check(self, build: str) -> CheckResult:
        """What the output check said of this build's streams; missing where nobody checked them."""
        return self._checks.get(build, NOT_CHECKED)

    @cached_property
    def _by_cell(self) -> dict[tuple[str, int], tuple[StreamRecord, ...]]:
        cells: dict[tuple[str, int], list[StreamRecord]] = {}
        for stream in self.streams:
            if not self._is_excluded(stream):
                cells.setdefault((stream.build, stream.depth), []).append(stream)
        return {cell: tuple(streams) for cell, streams in cells.items()}

    @cached_property
    def _checks(self) -> dict[str, CheckResult]:
        counted: dict[str, int] = {}
        for stream in ok_streams(self.streams):
            counted[stream.build] = counted.get(stream.build, 0) + 1
        found = counting_outcomes(self.path)
        return {build: _check_result(outcome, counted.get(build, 0)) for build, outcome in found.items()}

    @cached_property
    def verdict(self) -> dict[str, object] | None:
        """verdict.json of a comparison, None for a run without one."""
        return read_document(self.path / "verdict.json")


def load_runs(paths: Iterable[Path]) -> tuple[SavedRun, ...]:
    """Every run directory in the order given: the first run's first build is the baseline."""
    return tuple(SavedRun.load(Path(path)) for path in paths)


def ok_streams(streams: Iterable[StreamRecord]) -> tuple[StreamRecord, ...]:
    """The streams that count."""
    return tuple(stream for stream in streams if stream.status is StreamStatus.OK)


def _check_result(outcome: OutputOutcome, counted: int) -> CheckResult:
    if outcome.streams != counted:
        reason = f"{outcome.streams} of {counted} streams were checked: run `kernarc-gate check RUN_DIR` again"
        return CheckResult(CheckState.MISSING, reason, outcome)
    if outcome.verdict is Verdict.PASS:
        return CheckResult(CheckState.PASSED, None, outcome)
    if outcome.verdict is Verdict.INCONCLUSIVE:
        return CheckResult(CheckState.MISSING, f"the output check could not run: {outcome.reason}", outcome)
    return CheckResult(CheckState.FAILED, f"output check: {outcome.reason}", outcome)


def _fixed_order(stream: StreamRecord) -> tuple[int, str, int, int, str]:
    return (stream.depth, stream.build, stream.launch, stream.slot, stream.request_id)
