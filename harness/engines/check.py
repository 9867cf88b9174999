"""Does an engine work here? It is started on the tiny checkpoint and asked for one answer."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..client.client import CompletionRequest, StreamingClient
from ..config.builds import Build, build_from_config
from ..config.checkpoints import Notify, ensure_checkpoint
from ..config.models import BuildConfig, LimitsConfig, ModelSource
from ..errors import EngineError
from ..run.records import StreamStatus
from .base import OnStarting
from .registry import engine_of
from .vllm_install import INSTALL_HINT, find_installation

PROMPT_TOKENS = 64
ANSWER_TOKENS = 16
# The check asks whether it serves, not how fast: without compilation vLLM is ready in half the time.
CHECK_ARGUMENTS = {"vllm": ("--enforce-eager",)}


@dataclass(frozen=True)
class EngineState:
    """What is installed, as far as files tell. where: its interpreter or package."""

    engine: str
    version: str | None
    where: str | None
    hint: str | None = None

    @property
    def is_installed(self) -> bool:
        """Whether there is anything to start."""
        return self.version is not None


@dataclass(frozen=True)
class EngineCheck:
    """An engine that served: how long it took to be ready, and what it answered."""

    engine: str
    version: str | None
    ready_s: float
    token_ids: tuple[int, ...]


def engine_states() -> list[EngineState]:
    """Every engine we can start."""
    kernarc = engine_of(build_from_config("kernarc", BuildConfig(engine="kernarc")), PROMPT_TOKENS)
    installation = find_installation()
    vllm = (
        EngineState("vllm", None, None, INSTALL_HINT)
        if installation is None
        else EngineState("vllm", f"{installation.version} ({installation.distribution})", str(installation.folder))
    )
    return [EngineState("kernarc", kernarc.version(), str(Path(__file__).parents[2])), vllm]


def check_engine(engine: str, notify: Notify, on_starting: OnStarting | None = None) -> EngineCheck:
    """Starts it, asks for one answer with drafts, stops it. EngineError with the log's end where any of that fails."""
    config = BuildConfig(
        engine="vllm" if engine == "vllm" else "kernarc",
        num_speculative_tokens=3,
        extra_args=CHECK_ARGUMENTS.get(engine, ()),
    )
    build = build_from_config(engine, config)
    checkpoint = ensure_checkpoint(ModelSource(synth="tiny"), notify)
    started = engine_of(build, PROMPT_TOKENS + ANSWER_TOKENS + 16)
    with tempfile.TemporaryDirectory(prefix="kernarc-check-") as folder:
        running = started.start(checkpoint.path, Path(folder) / f"{engine}.log", LimitsConfig(), on_starting)
        try:
            ids = _ask(build, running.base_url, running.model_name)
            return EngineCheck(engine, started.version(), running.ready_s, ids)
        finally:
            running.stop()


def _ask(build: Build, base_url: str, model_name: str) -> tuple[int, ...]:
    request = CompletionRequest(
        prompt_ids=tuple(range(10, 10 + PROMPT_TOKENS)), max_tokens=ANSWER_TOKENS, model=model_name
    )
    with StreamingClient(base_url) as client:
        outcome = client.complete(request)
    if outcome.status is not StreamStatus.OK:
        raise EngineError(f"{build.name} started but did not answer soundly: {outcome.void_reason}")
    if len(outcome.token_ids) != ANSWER_TOKENS:
        raise EngineError(f"{build.name} sent {len(outcome.token_ids)} token ids where {ANSWER_TOKENS} were asked for")
    return outcome.token_ids
