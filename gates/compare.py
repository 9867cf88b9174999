"""A comparison from its first launch to its verdict: measure, look, check outputs, decide or go on."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..harness.caches import cache_folder
from ..harness.errors import EngineError, KernarcError, VoidMeasurementError
from ..harness.run.run import Run
from ..reports.saved import saved_outcomes, standing_outcomes
from .comparison import Measured, evaluate
from .config import GateConfig
from .display import GateDisplay
from .outcomes import GateOutcome, OutputOutcome, Verdict
from .output.check_file import standing
from .output.run_check import RunChecker
from .words import with_words

VERDICT_FILE = "verdict.json"
CHECK_FILE = "check.json"


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
class KeptCheck:
    """An earlier finding that this check does not replace, and why. is_fail: a FAIL that was judged more strictly."""

    build: str
    is_fail: bool
    reason: str


def write_check(run_dir: Path, outcomes: list[OutputOutcome]) -> list[KeptCheck]:
    """check.json: what `check` found, beside the records it judged → what it left as it was.

    An earlier finding stays for builds not asked about, where this time nothing could be read, and where it is a FAIL
    that this check was too lenient to undo.
    """
    earlier = {outcome.build: outcome for outcome in saved_outcomes(run_dir / CHECK_FILE)}
    counting = standing_outcomes(run_dir)
    found_kept = [_kept(run_dir, counting.get(o.build), earlier.get(o.build), o) for o in outcomes]
    kept = {one.build: one for one in found_kept if one is not None}
    found = {**earlier, **{outcome.build: outcome for outcome in outcomes if outcome.build not in kept}}
    content = {"output_checks": [json.loads(outcome.model_dump_json()) for outcome in found.values()]}
    temporary = run_dir / f"{CHECK_FILE}.new"
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(run_dir / CHECK_FILE)
    return list(kept.values())


def _kept(
    run_dir: Path, counting: OutputOutcome | None, in_check: OutputOutcome | None, now: OutputOutcome
) -> KeptCheck | None:
    if counting is not None and standing(counting, now) is not now:
        anew = f"delete {run_dir / CHECK_FILE}" if counting == in_check else "compare again"
        return KeptCheck(now.build, True, f"the earlier FAIL stands, because {_weaker(counting, now)}; or {anew}")
    if now.positions == 0 and in_check is not None and in_check.positions:
        return KeptCheck(now.build, False, f"{CHECK_FILE} keeps what an earlier check found")
    return None


def _weaker(earlier: OutputOutcome, now: OutputOutcome) -> str:
    """What a check lacked to undo a FAIL, and what would."""
    if now.positions == 0:
        return "this time nothing could be read: see the reason, and check again"
    rates = [f"{100 * (check.max_divergence_rate or 0.0):.4g} %" for check in (earlier, now)]
    taus = ["none" if check.tau is None else f"{check.tau:.3g}" for check in (earlier, now)]
    return (
        f"it allowed less ({rates[0]} of a stream's tokens to diverge, τ {taus[0]}) than this check ({rates[1]}, "
        f"τ {taus[1]}): check again with a configuration that allows no more"
    )
