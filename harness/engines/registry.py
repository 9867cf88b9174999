"""Which class starts which engine, and what a run writes down of each build before its first stream."""

import hashlib

from ..config.builds import Build
from ..config.checkpoints import Checkpoint
from ..config.source_code import SourceCode
from ..errors import ConfigError
from ..run.records import BuildRecord
from .base import Engine
from .kernarc import KernarcEngine, draft_vocab_path, draft_vocab_size
from .vllm import VllmEngine

ENGINES: dict[str, type[Engine]] = {"kernarc": KernarcEngine, "vllm": VllmEngine}


def engine_of(build: Build, max_context: int) -> Engine:
    """The engine of a build that we start; max_context in tokens."""
    if build.engine not in ENGINES:
        raise ConfigError(f"{build.name}: engine {build.engine!r} is not started by us")
    return ENGINES[build.engine](build, max_context)


def build_record(build: Build, checkpoint: Checkpoint | None, max_context: int) -> BuildRecord:
    """The build as it would be started now. checkpoint: None for an endpoint; max_context in tokens."""
    if checkpoint is None:
        return BuildRecord(
            name=build.name,
            engine=build.engine,
            engine_version=None,
            command=(),
            model=build.config.served_model or build.config.url or "",
            model_sha256=None,
            num_speculative_tokens=build.num_speculative_tokens,
            environment=build.config.environment,
        )
    engine = engine_of(build, max_context)
    code = engine.source_code() or SourceCode()
    is_of_commit = build.git_commit is not None
    drafted = draft_vocab_size(build, checkpoint.path)
    return BuildRecord(
        name=build.name,
        engine=build.engine,
        engine_version=engine.version(),
        command=tuple(engine.command(checkpoint.path, 0)),
        model=str(checkpoint.path),
        model_sha256=checkpoint.sha256(),
        num_speculative_tokens=build.num_speculative_tokens,
        draft_vocab_size=drafted,
        draft_vocab_sha256=_draft_vocab_sha256(build, checkpoint),
        vocab_size=None if drafted is None else checkpoint.vocab_size,
        library_versions=engine.library_versions(),
        environment=build.config.environment,
        structured_acceptance=checkpoint.structured_acceptance,
        git_commit=build.git_commit if is_of_commit else code.git_commit,
        git_dirty=build.git_dirty if is_of_commit else code.git_dirty,
        sources_sha256=code.sha256,
    )


def _draft_vocab_sha256(build: Build, checkpoint: Checkpoint) -> str | None:
    path = draft_vocab_path(build, checkpoint.path)
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
