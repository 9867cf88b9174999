"""The bundled decoder, started as a process like any other engine."""

import sys
from pathlib import Path

from ... import __version__
from .base import Engine


class KernarcEngine(Engine):
    """`python -m kernarc.cli serve`, with the code of the build's own pythonpath where it has one."""

    def command(self, model: Path, port: int) -> list[str]:
        """serve MODEL with the build's drafts and device."""
        config = self.build.config
        command = [config.python or sys.executable, "-m", "kernarc.cli", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--device", config.device]
        command += ["--max-context", str(self.max_context)]
        if config.num_speculative_tokens is not None:
            command += ["--num-speculative-tokens", str(config.num_speculative_tokens)]
        return [*command, *config.extra_args]

    def version(self) -> str | None:
        """Ours, or the commit's where the build runs a commit."""
        return self.build.git_commit or __version__
