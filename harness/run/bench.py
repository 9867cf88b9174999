"""From a bench configuration to a plan: which builds can run here, and what they run on."""

from dataclasses import dataclass

from ..config.builds import Build, resolve_builds
from ..config.models import BenchConfig
from ..engines.vllm_install import INSTALL_HINT, find_installation
from ..errors import ConfigError
from .plan import RunPlan


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
    missing = [build.name for build in builds if _needs_missing_vllm(build)]
    remark = None
    if missing:
        if builds_given is not None or not config.builds_without_vllm:
            raise ConfigError(f"{', '.join(missing)}: vLLM is not installed", INSTALL_HINT)
        builds = resolve_builds(config.builds_without_vllm, config.model)
        remark = f"vLLM is not installed, so {' and '.join(b.name for b in builds)} are compared; {INSTALL_HINT}"
    effective = config.model_copy(update={"builds": builds_given or config.builds})
    return BenchPlan(RunPlan.of("bench", name, effective, builds, config.launches), remark)


def _needs_missing_vllm(build: Build) -> bool:
    return build.engine == "vllm" and build.config.python is None and find_installation() is None
