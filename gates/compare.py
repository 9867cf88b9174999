"""A comparison from its first launch to its verdict: measure, look, check outputs, decide or go on.

From the same records and checks `evaluate` always gives the same outcome.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..harness.caches import cache_folder
from ..harness.errors import EngineError, KernarcError, VoidMeasurementError
from ..harness.run.records import LaunchRecord, RunManifest, StreamRecord
from ..harness.run.run import Run
from .attribution import attribute, fraction
from .busy_neighbours import builds_beside_busy, busy_neighbour_reason
from .config import GateConfig
from .control import NO_CONTROL, ControlReport, judge_blocks
from .crossover import candidate_second
from .display import GateDisplay
from .first_token import first_token_effects
from .intervals import DepthInterval, depth_intervals
from .outcomes import (
    Attribution,
    Crowding,
    DepthOutcome,
    Estimator,
    FirstTokenEffect,
    GateOutcome,
    OrderEffect,
    OutputOutcome,
    Verdict,
)
from .output.run_check import RunChecker
from .pairing import Pairing, pair_streams
from .verdict import improved_depths, joint_verdict, launches_needed, speed_verdict
from .words import with_words

VERDICT_FILE = "verdict.json"


class Comparison:
    """One run under one gate. Whatever goes wrong leaves a verdict that is not PASS."""

    def __init__(self, run: Run, config: GateConfig, display: GateDisplay) -> None:
        self._run = run
        self._config = config
        self._display = display
        self._launches = 0  # measured to their end
        manifest = run.directory.manifest()
        self._builds = [build.name for build in manifest.builds[:2]]
        self._checker = RunChecker(
            manifest,
            config.output_check,
            output_check_cache(),
            config.void_rules,
        )

    def decide(self) -> GateOutcome:
        """Measures up to each look until one decides, writes verdict.json and returns the outcome.

        An engine that dies voids the comparison. Ctrl-C and configuration errors pass through; anything unexpected
        becomes a VoidMeasurementError.
        """
        try:
            with unexpected_is_void(self._run.directory.path):
                outcome = self._looks()
            self._run.finish(max(1, outcome.launches))
        except EngineError as error:
            self._display.notify(f"error: {error}")  # with its hint and the engine's last words
            outcome = self._evaluate(self._launches, (), void_reasons=(error.message.splitlines()[0],))
        outcome = with_words(outcome)
        self._run.directory.write_document(VERDICT_FILE, outcome.model_dump_json(indent=2))
        return outcome

    def _looks(self) -> GateOutcome:
        for look in self._config.looks:
            self._display.begin_look(self._run, look)
            while self._launches < look:
                outcome = self._measure_launch()
                wrong_output = self._launches == 1 and outcome.verdict is not Verdict.INCONCLUSIVE
                if wrong_output or outcome.void_reasons:
                    return outcome
            outcome = self._checked(look)
            undecided = outcome.verdict is Verdict.INCONCLUSIVE and outcome.speed_verdict is Verdict.INCONCLUSIVE
            if not undecided or outcome.not_restarted:  # repeats of one start settle nothing, however many
                break
        return outcome

    def _measure_launch(self) -> GateOutcome:
        """One more launch; its outcome knows the outputs of the first one, because wrong ones need no second look."""
        self._run.measure_launch(self._launches)
        self._launches += 1
        outcome = self._evaluate(self._launches, ())
        if self._launches == 1 or outcome.void_reasons:
            outcome = self._checked(self._launches)
        self._display.launch_done(outcome)
        return outcome

    def _checked(self, launches: int) -> GateOutcome:
        """The outcome with every token of the measured streams judged."""
        streams = [stream for stream in self._run.directory.streams() if stream.launch < launches]
        requests = self._run.directory.requests()
        checks = self._checker.check(self._builds, streams, requests, self._display.checking)
        baseline, candidate = self._builds
        return self._evaluate(launches, checks, self._checker.identity(baseline, candidate, streams, requests))

    def _evaluate(
        self,
        launches: int,
        checks: tuple[OutputOutcome, ...] | list[OutputOutcome],
        identity: str = "",
        void_reasons: tuple[str, ...] = (),
    ) -> GateOutcome:
        directory = self._run.directory
        measured = Measured(directory.manifest(), directory.streams(), launches)
        return evaluate(measured, self._config, checks, identity=identity, void_reasons=void_reasons)


@contextmanager
def unexpected_is_void(run_dir: Path) -> Iterator[None]:
    """An exception that nobody foresaw is a void measurement (exit code 4), never a pass and never a regression."""
    try:
        yield
    except KernarcError:
        raise
    except Exception as error:
        raise VoidMeasurementError(
            f"the gate broke: {type(error).__name__}: {error}",
            f"this is a fault of ours; the measured streams are kept in {run_dir}",
        ) from error


def output_check_cache() -> Path:
    """Where the reference's results are kept between runs."""
    return cache_folder("output-checks")


@dataclass(frozen=True)
class Measured:
    """What a run has so far: its manifest, its streams, and how many launches (from 0) were measured to their end."""

    manifest: RunManifest
    streams: Sequence[StreamRecord]
    launches: int

    @property
    def baseline(self) -> str:
        """The first build of the run."""
        return self.manifest.builds[0].name

    @property
    def candidate(self) -> str:
        """The second build of the run."""
        return self.manifest.builds[1].name

    @property
    def not_restarted(self) -> tuple[str, ...]:
        """Those of the two whose server we only connect to again: every launch repeats the luck of one start."""
        return tuple(build.name for build in self.manifest.builds[:2] if build.engine == "endpoint")

    def pairing(self, void_blocks: frozenset[tuple[int, int]] = frozenset()) -> Pairing:
        """Pairs of the first two builds over the measured launches, less the (launch, block) in void_blocks."""
        return pair_streams(
            self.streams,
            baseline=self.baseline,
            candidate=self.candidate,
            depths=self.manifest.depths,
            launches=range(self.launches),
            requests_per_depth=self.manifest.requests_per_depth,
            max_missing_pairs_per_depth=self.manifest.max_void_streams_per_cell,
            void_blocks=void_blocks,
        )

    def busy_neighbours(self, config: GateConfig, void_blocks: frozenset[tuple[int, int]]) -> tuple[Crowding, ...]:
        """Which of the two had too many streams begin beside a busy neighbour, judged as of the first look at least."""
        return builds_beside_busy(
            self.streams,
            (self.baseline, self.candidate),
            launches=self.launches,
            planned_a_depth=self.manifest.requests_per_depth * max(self.launches, config.looks[0]),
            void_blocks=void_blocks,
        )

    def candidate_second(self, pairing: Pairing) -> tuple[bool, ...] | None:
        """Whether the candidate was started after the baseline, for every launch of a pairing; None: no start order."""
        return candidate_second(self.manifest, self.baseline, self.candidate, pairing.launches)


def evaluate(
    measured: Measured,
    config: GateConfig,
    output_checks: Sequence[OutputOutcome] = (),
    *,
    identity: str = "",
    void_reasons: Sequence[str] = (),
) -> GateOutcome:
    """The outcome of the launches measured so far.

    output_checks: baseline's, candidate's; none while they have not run, which never passes. void_reasons: what went
    wrong outside the records (an engine died, an interruption).
    """
    control = control_report(measured, config)
    pairing = measured.pairing(control.void_blocks)
    crowding = measured.busy_neighbours(config, control.void_blocks)
    reasons = (*void_reasons, *control.void_reasons, *pairing.void_reasons, *map(busy_neighbour_reason, crowding))
    estimates = _estimates(measured, pairing, config)
    intervals = [estimate.interval for estimate in estimates]
    checks = {check.build: check for check in output_checks}
    speed = speed_verdict(intervals, config.margin, are_fresh_launches=not measured.not_restarted)
    verdict = joint_verdict(speed, checks.get(measured.baseline), checks.get(measured.candidate), reasons)
    needed = None
    if verdict is Verdict.INCONCLUSIVE and speed is Verdict.INCONCLUSIVE and not measured.not_restarted:
        needed = launches_needed(intervals, config.margin, config.confidence_of_a_look, config.confidence)
    depths = measured.manifest.depths
    is_decidable = not (reasons or measured.not_restarted)
    return GateOutcome(
        run_id=measured.manifest.run_id,
        baseline=measured.baseline,
        candidate=measured.candidate,
        verdict=verdict,
        speed_verdict=speed,
        improved_depths=improved_depths(list(zip(depths, intervals, strict=False))) if is_decidable else (),
        margin=config.margin,
        confidence=config.confidence_of_a_look,
        estimator=_estimator(intervals),
        launches=measured.launches,
        launch_limit=config.launch_limit,
        depths=tuple(_depth_outcome(depth, estimate) for depth, estimate in zip(depths, estimates, strict=False)),
        output_checks=tuple(output_checks),
        identity=identity,
        void_reasons=reasons,
        crowding=crowding,
        launches_needed=needed,
        not_restarted=measured.not_restarted,
        seconds_a_launch=seconds_a_launch(measured.streams, measured.manifest.launch_records),
    )


def seconds_a_launch(streams: Sequence[StreamRecord], launches: Sequence[LaunchRecord]) -> float | None:
    """Mean time from a launch's first request to its last answer, plus starting its engines; None before the first."""
    spans: dict[int, tuple[int, int]] = {}
    for stream in streams:
        first, last = spans.get(stream.launch, (stream.sent_ns, stream.ended_ns))
        spans[stream.launch] = (min(first, stream.sent_ns), max(last, stream.ended_ns))
    if not spans:
        return None
    measuring_s = sum(last - first for first, last in spans.values()) / 1e9
    return (measuring_s + sum(record.ready_s for record in launches)) / len(spans)


def control_report(measured: Measured, config: GateConfig) -> ControlReport:
    """The blocks that the control build voids; none where the gate has no control."""
    names = [build.name for build in measured.manifest.builds]
    if config.control is None:
        return NO_CONTROL
    if len(names) < 3:
        return ControlReport(frozenset(), (f"the control build {config.control} was not measured",))
    done = [stream for stream in measured.streams if stream.launch < measured.launches]
    return judge_blocks(done, names[2], max_drift=config.max_control_drift, max_void_share=config.max_void_block_share)


@dataclass(frozen=True)
class _Estimate:
    """One depth: what is judged, where it comes from, and what is only told."""

    interval: DepthInterval
    attribution: Attribution | None
    first_token: FirstTokenEffect | None


def _estimates(measured: Measured, pairing: Pairing, config: GateConfig) -> list[_Estimate]:
    if not pairing.launches or not pairing.depths:
        return []
    ratios = [pairs.log_tpot_ratios() for pairs in pairing.depths]
    confidence, n_resamples, seed = config.confidence_of_a_look, config.n_resamples, measured.manifest.seed
    orders = measured.candidate_second(pairing)
    intervals = depth_intervals(
        ratios, confidence=confidence, n_resamples=n_resamples, seed=seed, candidate_second=orders
    )
    attributions = attribute(
        pairing.depths, confidence=confidence, n_resamples=n_resamples, seed=seed, candidate_second=orders
    )
    first_tokens = first_token_effects(
        pairing.depths, confidence=confidence, n_resamples=n_resamples, seed=seed, candidate_second=orders
    )
    return [_Estimate(*parts) for parts in zip(intervals, attributions, first_tokens, strict=True)]


def _estimator(intervals: Sequence[DepthInterval]) -> Estimator:
    is_crossover = bool(intervals) and all(interval.order_effect is not None for interval in intervals)
    return Estimator.CROSSOVER if is_crossover else Estimator.LAUNCH_MEAN


def _order_outcome(interval: DepthInterval) -> OrderEffect | None:
    order = interval.order_effect
    if order is None:
        return None
    half_width = interval.student_half_width
    return OrderEffect(effect=math.expm1(order), low=fraction(order - half_width), high=fraction(order + half_width))


def _depth_outcome(depth: int, found: _Estimate) -> DepthOutcome:
    interval, estimate = found.interval, found.interval.point_estimate
    return DepthOutcome(
        depth=depth,
        point_estimate=math.expm1(estimate),
        low=fraction(interval.low),
        high=fraction(interval.high),
        bootstrap_low=fraction(estimate - interval.bootstrap_half_width),
        bootstrap_high=fraction(estimate + interval.bootstrap_half_width),
        student_low=fraction(estimate - interval.student_half_width),
        student_high=fraction(estimate + interval.student_half_width),
        launches=interval.launches,
        pairs=interval.pairs,
        attribution=found.attribution,
        order_effect=_order_outcome(interval),
        first_token=found.first_token,
    )
