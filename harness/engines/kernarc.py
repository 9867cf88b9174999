"""The bundled decoder, started as a process like any other engine."""

import json
import sys
from functools import cached_property
from pathlib import Path

from ..config.builds import MODELS_OWN, Build
from ..config.source_code import SourceCode, imported_code
from ..errors import ConfigError
from .base import Engine

DRAFT_VOCAB_FILE = "draft_vocab.json"


def draft_vocab_path(build: Build, model: Path) -> Path | None:
    """The file of the tokens that a build may draft; None: all of them."""
    chosen = build.config.draft_vocab
    if chosen is None:
        return None
    return model / DRAFT_VOCAB_FILE if chosen == MODELS_OWN else Path(chosen)


def draft_vocab_size(build: Build, model: Path) -> int | None:
    """How many tokens that file lists. Raises ConfigError where it cannot be read."""
    path = draft_vocab_path(build, model)
    if path is None:
        return None
    try:
        return len(json.loads(path.read_text(encoding="utf-8"))["ids"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{build.name}: {path} is no draft vocabulary ({type(error).__name__})",
            "write one with `kernarc-gate model draft-vocab`, or make a structured model with `emitted`",
        ) from error


class KernarcEngine(Engine):
    """`python -m kernarc.cli serve`, with the code of the build's own pythonpath where it has one."""

    def command(self, model: Path, port: int) -> list[str]:
        """serve MODEL with the build's drafts and device."""
        config = self.build.config
        command = [self._python, "-m", "kernarc.cli", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--device", config.device]
        command += ["--max-context", str(self.max_context)]
        if config.num_speculative_tokens is not None:
            command += ["--num-speculative-tokens", str(config.num_speculative_tokens)]
        if (path := draft_vocab_path(self.build, model)) is not None:
            command += ["--draft-vocab", str(path)]
        for option, value in (("--draft-window", config.draft_window), ("--draft-context", config.draft_context)):
            if value is not None:
                command += [option, str(value)]
        return [*command, *config.extra_args]

    def version(self) -> str | None:
        """What the code itself says, or its commit where the build runs a commit."""
        return self.build.git_commit or self._code.version

    def source_code(self) -> SourceCode:
        """As the build's own interpreter finds it."""
        return self._code

    def library_versions(self) -> dict[str, str]:
        """Of that interpreter's environment, where it is not ours."""
        return dict(self._code.library_versions)

    @property
    def _python(self) -> str:
        return self.build.config.python or sys.executable

    @cached_property
    def _code(self) -> SourceCode:
        return imported_code(self._python, self.environment())
