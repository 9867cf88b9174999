"""All that a run will do, fixed before its first stream and kept beside its records, so that it can be resumed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ..config.builds import Build, resolve_builds
from ..config.checkpoints import Checkpoint
from ..config.models import BenchConfig, MeasurementConfig
from ..config.yaml_files import to_yaml
from ..engines.vllm_install import INSTALL_HINT, find_installation
from ..errors import ConfigError, RecordError
from .records import Record
from .requests import LibraryText, PromptSource, RandomIds, RequestSet, RequestShape
from .storage import RunDirectory

ROOM_FOR_DRAFTS = 16  # tokens an engine may write beyond the answer while it verifies


class RunPlan(Record):
    """Builds (baseline first), what is sent to them, and how often.

    kind: bench, compare or calibrate. launches: at most; a gate may stop earlier. config_yaml: the effective values.
    """

    kind: str
    config_name: str
    config_yaml: str
    measurement: MeasurementConfig
    builds: tuple[Build, ...]
    launches: int

    @classmethod
    def of(
        cls, kind: str, config_name: str, config: MeasurementConfig, builds: Sequence[Build], launches: int
    ) -> "RunPlan":
        """A plan from a bench's or a gate's configuration."""
        measured = {name: getattr(config, name) for name in MeasurementConfig.model_fields}
        return cls(
            kind=kind,
            config_name=config_name,
            config_yaml=to_yaml(config),
            measurement=MeasurementConfig(**measured),
            builds=tuple(builds),
            launches=launches,
        )

    @property
    def max_context(self) -> int:
        """Tokens that an engine must be able to hold."""
        return max(self.measurement.depths) + self.measurement.max_tokens + ROOM_FOR_DRAFTS

    def request_set(self, checkpoints: Sequence[Checkpoint]) -> RequestSet:
        """The prompts: real text where every build reads it with the same tokenizer, random ids otherwise."""
        measurement = self.measurement
        shape = RequestShape(
            depths=measurement.depths,
            requests_per_depth=measurement.requests_per_depth,
            warmup_requests_per_depth=measurement.warmup_requests_per_depth,
            launches=self.launches,
            max_tokens=measurement.max_tokens,
            seed=measurement.seed,
        )
        return RequestSet(shape, self._prompt_source(checkpoints))

    def _prompt_source(self, checkpoints: Sequence[Checkpoint]) -> PromptSource:
        endpoints = [build.config for build in self.builds if build.engine == "endpoint"]
        tokenizers = [checkpoint.tokenizer_json for checkpoint in checkpoints]
        tokenizers += [config.tokenizer_json for config in endpoints]
        contents = {None if path is None else _contents(path) for path in tokenizers}
        if len(contents) == 1 and tokenizers[0] is not None:
            return LibraryText(tokenizers[0])
        sizes = [checkpoint.vocab_size for checkpoint in checkpoints] + [config.vocab_size for config in endpoints]
        ends = {token for checkpoint in checkpoints for token in checkpoint.eos_token_ids}
        return RandomIds(min(sizes), tuple(ends))


def _contents(tokenizer_json: Path) -> bytes:
    try:
        return tokenizer_json.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{tokenizer_json}: this tokenizer cannot be read: {error.strerror}",
            "name a tokenizer.json as the build's `tokenizer`, or none: prompts are random ids then",
        ) from error


def write_plan(directory: RunDirectory, plan: RunPlan) -> None:
    """Keeps the plan as plan.json."""
    directory.write_document("plan.json", plan.model_dump_json(indent=2))


def read_plan(directory: RunDirectory) -> RunPlan:
    """The plan a run was created with. RecordError where it is not there or not one."""
    path = directory.path / "plan.json"
    directory.manifest()  # says so where this is no run directory at all
    try:
        return RunPlan.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise RecordError(f"{path} is not a run's plan: {error}", "a run without its plan cannot be resumed") from error


def require_distinct_names(builds: Sequence[Build]) -> None:
    """Streams are told apart by their build's name."""
    names = [build.name for build in builds]
    if len(set(names)) != len(names):
        raise ConfigError(f"two builds are called the same: {', '.join(names)}", "give one of them another name")


@dataclass(frozen=True)
class BenchPlan:
    """The plan, and one line to tell where it is not quite what the configuration asks for."""

    plan: RunPlan
    remark: str | None = None


def bench_plan(name: str, config: BenchConfig, builds_given: tuple[str, ...] | None = None) -> BenchPlan:
    """The plan of a bench; builds_given: named on the command line, so never replaced.

    Where vLLM is wanted but not installed the configuration's builds_without_vllm stand in; ConfigError without any.
    """
    builds = resolve_builds(builds_given or config.builds, config.model)
    missing = [build.name for build in builds if build.engine == "vllm" and build.config.python is None]
    remark = None
    if missing and find_installation() is None:
        if builds_given is not None or not config.builds_without_vllm:
            raise ConfigError(f"{', '.join(missing)}: vLLM is not installed", INSTALL_HINT)
        builds = resolve_builds(config.builds_without_vllm, config.model)
        remark = f"vLLM is not installed, so {' and '.join(b.name for b in builds)} are compared; {INSTALL_HINT}"
    effective = config.model_copy(update={"builds": builds_given or config.builds})
    return BenchPlan(RunPlan.of("bench", name, effective, builds, config.launches), remark)
