"""A comparison from its first launch to its verdict: measure, look, check outputs, decide or go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..harness.caches import cache_folder
from ..harness.errors import EngineError, KernarcError, VoidMeasurementError
from ..harness.run.run import Run
from .comparison import Measured, evaluate
from .config import GateConfig
from .display import GateDisplay
from .outcomes import GateOutcome, OutputOutcome, Verdict
from .output.run_check import RunChecker
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
