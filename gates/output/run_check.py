"""The output check of a finished or growing run: every build against the checkpoint that it serves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from ...harness.config.checkpoints import Checkpoint
from ...harness.config.models import VoidRulesConfig
from ...harness.errors import KernarcError
from ...harness.run.agreement import id_agreement
from ...harness.run.records import BuildRecord, RunManifest, StreamRecord, StreamStatus
from ...harness.run.storage import Request
from ..config import OutputCheckConfig
from ..outcomes import OutputOutcome
from .check import SEND_IDS, Scorer, Text, check_build, could_not_run
from .known_output import KnownOutputScorer
from .near_ties import RoundingErrors

OnChecked = Callable[[int, int], None]  # streams done, streams in all


@dataclass(frozen=True)
class _Unjudged:
    """Why a build has no usable reference, and what to do about it."""

    reason: str
    remedy: str


@dataclass
class _Judge:
    """The reference of one checkpoint and what rounding does to it; errors None: its tokens are known."""

    scorer: Scorer
    errors: RoundingErrors | None
    end_token_ids: frozenset[int]
    is_structured: bool  # the reference's weights

    @property
    def tau(self) -> float:
        return 0.0 if self.errors is None else self.errors.tau


class NoOutputError(KernarcError):
    """A build without a token that the check could read; its reference may be sound."""


class RunChecker:
    """Checks builds of one run; keeps the references loaded between looks."""

    def __init__(
        self,
        manifest: RunManifest,
        config: OutputCheckConfig,
        cache_dir: Path,
        rules: VoidRulesConfig = VoidRulesConfig(),  # noqa: B008  frozen
    ) -> None:
        self._manifest = manifest
        self._config = config
        self._cache_dir = cache_dir
        self._rules = rules
        self._judges: dict[Path, _Judge] = {}

    def check(
        self,
        builds: Sequence[str],
        streams: Sequence[StreamRecord],
        requests: dict[str, Request],
        on_checked: OnChecked,
    ) -> list[OutputOutcome]:
        """One outcome a build. Where a build has no readable reference the outcome says so, and never passes."""
        prompts = {request_id: request.prompt_ids for request_id, request in requests.items()}
        judges = {build: self._judge_or_reason(build, streams, prompts) for build in builds}
        self._read_all(judges, streams, prompts, on_checked)
        outcomes = [self._outcome(build, judges[build], streams, prompts) for build in builds]
        for judge in self._judges.values():
            judge.scorer.release()
        return outcomes

    def identity(
        self, baseline: str, candidate: str, streams: Sequence[StreamRecord], requests: dict[str, Request]
    ) -> str:
        """Whether both emitted the same ids; where they first part, and what the reference thinks of both."""
        agreement = id_agreement(streams, baseline, candidate)
        if agreement.first_difference is None:
            return agreement.sentence()
        request_id, position = agreement.first_difference
        opinions = [self._opinion(build, request_id, position, streams, requests) for build in (baseline, candidate)]
        return f"{agreement.sentence()}: {'; '.join(opinions)}"

    def _opinion(
        self, build: str, request_id: str, position: int, streams: Sequence[StreamRecord], requests: dict[str, Request]
    ) -> str:
        output = next(stream for stream in _checked(streams, [build]) if stream.request_id == request_id).token_ids
        if position >= len(output):
            return f"{build} ended there"
        path = self._reference_path(build)
        judge = self._judges.get(path) if path is not None else None
        if judge is None or request_id not in requests:
            return f"{build} emitted {output[position]}"
        scores = judge.scorer.scores(requests[request_id].prompt_ids, output)
        gap = float(scores.gaps[position])
        kind = "the reference's choice" if gap == 0 else "a near-tie" if 0 < gap <= judge.tau else "a divergence"
        return f"{build} emitted {output[position]} (gap {gap:.4g}, {kind})"

    def _judge_or_reason(
        self, build: str, streams: Sequence[StreamRecord], prompts: dict[str, tuple[int, ...]]
    ) -> _Judge | _Unjudged:
        path = self._reference_path(build)
        if path is None:
            return _Unjudged(
                "an endpoint has no local weights; set output_check.reference_model to the checkpoint it serves",
                "Give the check a reference: set output_check.reference_model to the checkpoint and compare again.",
            )
        try:
            if path not in self._judges:
                self._judges[path] = self._new_judge(path, streams, prompts)
        except KernarcError as error:
            return _unusable(error)
        return self._judges[path]

    def _new_judge(self, path: Path, streams: Sequence[StreamRecord], prompts: dict[str, tuple[int, ...]]) -> _Judge:
        """τ comes from the first outputs, at each depth, of the first build that this checkpoint serves."""
        ends = frozenset(Checkpoint(path).eos_token_ids) if self._rules.early_stop == "note" else frozenset[int]()
        if self._config.reference == "known_output":
            return _Judge(KnownOutputScorer(path), None, ends, is_structured=True)
        build = next(build.name for build in self._manifest.builds if self._reference_path(build.name) == path)
        texts: list[Text] = []
        for depth in self._manifest.depths:
            of_depth = [stream for stream in _checked(streams, [build]) if stream.depth == depth and stream.token_ids]
            for stream in of_depth[: self._config.calibration_streams_per_depth]:
                if stream.request_id in prompts:
                    texts.append((prompts[stream.request_id], stream.token_ids))
        if not texts:
            raise NoOutputError(f"{build} has no emitted token to check or to calibrate τ on")
        from .scoring import ReferenceScorer  # brings torch and transformers, which take seconds to import

        scorer = ReferenceScorer(path, self._config, self._cache_dir)
        is_structured = Checkpoint(path).structured_acceptance is not None
        return _Judge(scorer, scorer.rounding_errors(texts), ends, is_structured)

    def _reference_path(self, build: str) -> Path | None:
        """None for an endpoint without a named reference."""
        record = self._record(build)
        if self._config.reference_model is not None:
            return Path(self._config.reference_model).expanduser()
        return None if record.engine == "endpoint" else Path(record.model).expanduser()

    def _record(self, build: str) -> BuildRecord:
        return next(record for record in self._manifest.builds if record.name == build)

    def _read_all(
        self,
        judges: dict[str, _Judge | _Unjudged],
        streams: Sequence[StreamRecord],
        prompts: dict[str, tuple[int, ...]],
        on_checked: OnChecked,
    ) -> None:
        """Fills the cache prompt by prompt, so that two builds' answers to one prompt cost one prefill."""
        wanted = sorted(_checked(streams, judges), key=lambda stream: (stream.depth, stream.launch, stream.request_id))
        for done, stream in enumerate(wanted, start=1):
            judge = judges[stream.build]
            if isinstance(judge, _Judge) and stream.request_id in prompts and stream.token_ids:
                try:
                    judge.scorer.scores(prompts[stream.request_id], stream.token_ids)
                except KernarcError as error:
                    judges[stream.build] = _unusable(error)
            on_checked(done, len(wanted))

    def _outcome(
        self,
        build: str,
        judge: _Judge | _Unjudged,
        streams: Sequence[StreamRecord],
        prompts: dict[str, tuple[int, ...]],
    ) -> OutputOutcome:
        if isinstance(judge, _Unjudged):
            return could_not_run(build, judge.reason, judge.remedy)
        return check_build(
            build,
            streams,
            prompts,
            judge.scorer,
            tau=judge.tau,
            errors=judge.errors,
            max_divergence_rate=self._config.max_divergence_rate,
            end_token_ids=judge.end_token_ids,
            loops_void=self._rules.repetition_loop == "void",
            is_structured=judge.is_structured or self._record(build).structured_acceptance is not None,
        )


def _unusable(error: KernarcError) -> _Unjudged:
    if isinstance(error, NoOutputError):
        return _Unjudged(error.message, SEND_IDS)
    hint = f" ({error.hint})" if error.hint else ""
    reason = f"the reference cannot be used: {error.message}" + (f"; {error.hint}" if error.hint else "")
    return _Unjudged(reason, f"Put the check's reference right{hint}, then compare again.")


def _checked(streams: Sequence[StreamRecord], builds: Iterable[str]) -> list[StreamRecord]:
    names = set(builds)
    return [
        stream
        for stream in streams
        if stream.build in names and not stream.is_warmup and stream.status is StreamStatus.OK
    ]


def void_rules_of(manifest: RunManifest) -> VoidRulesConfig:
    """The rules that a run was measured under, from the configuration it keeps; the defaults where it keeps none."""
    kept = yaml.safe_load(manifest.config_yaml) or {}
    return VoidRulesConfig.model_validate(kept.get("void_rules", {}))
