"""Stock vLLM, in the environment that `engines install vllm` made or in the one a build names."""

import json
import os
from importlib import metadata
from pathlib import Path

from ..errors import EngineError
from .base import Engine
from .vllm_install import INSTALL_HINT, SITE_FOLDER, VllmInstallation, find_installation

CPU_KV_CACHE_GIB = "2"
GPU_MEMORY_UTILIZATION = "0.85"
LIBRARIES = ("torch", "triton", "transformers", "flashinfer-python")  # which decide its kernels


class VllmEngine(Engine):
    """vLLM's OpenAI server as shipped: compiled mode, one sequence, no prefix cache, MTP drafts where asked for."""

    def command(self, model: Path, port: int) -> list[str]:
        """vLLM's own server, as a module: its `vllm` command asks for a distribution of that name."""
        config = self.build.config
        command = [self._python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(self.max_context)]
        command += ["--max-num-seqs", "1", "--no-enable-prefix-caching"]
        if not (model / "tokenizer.json").is_file():
            command.append("--skip-tokenizer-init")
        if config.num_speculative_tokens:
            drafts = {"method": "mtp", "num_speculative_tokens": config.num_speculative_tokens}
            command += ["--speculative-config", json.dumps(drafts)]
        if not self._is_cpu() and "--gpu-memory-utilization" not in config.extra_args:
            command += ["--gpu-memory-utilization", GPU_MEMORY_UTILIZATION]
        return [*command, *config.extra_args]

    def environment(self) -> dict[str, str]:
        """Nothing is looked up or reported on the network; a stated KV cache on a CPU; our site folder comes first.

        An environment of its own sees no PYTHONPATH but ours; a host's interpreter keeps what it is given.
        """
        own = super().environment()
        paths = [str(SITE_FOLDER)]
        if self._installation() is None:
            paths += filter(None, [own.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])
        search = {"PYTHONPATH": os.pathsep.join(paths)}
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        cpu = {"VLLM_CPU_KVCACHE_SPACE": CPU_KV_CACHE_GIB} if self._is_cpu() else {}
        return {**quiet, **cpu, **own, **search}

    def version(self) -> str | None:
        """Of the installation, or of the first vLLM on the build's own pythonpath; None where files do not tell."""
        installation = self._installation()
        if installation is not None:
            return installation.version
        found = (path for entry in self.build.pythonpath for path in sorted(Path(entry).glob("vllm-*.dist-info")))
        return next((path.name.removeprefix("vllm-").removesuffix(".dist-info") for path in found), None)

    def library_versions(self) -> dict[str, str]:
        """By the metadata of the installation, or of the build's own pythonpath."""
        installation = self._installation()
        sites = self.build.pythonpath if installation is None else map(str, installation.sites)
        found = metadata.distributions(path=list(sites))
        names = ((distribution.metadata["Name"], distribution.version) for distribution in found)
        return {name: version for name, version in sorted(names) if name in LIBRARIES}

    def _python(self) -> str:
        if self.build.config.python is not None:
            return self.build.config.python
        installation = self._installation()
        if installation is None:
            raise EngineError("vLLM is not installed", INSTALL_HINT)
        return str(installation.python)

    def _installation(self) -> VllmInstallation | None:
        return None if self.build.config.python is not None else find_installation()

    def _is_cpu(self) -> bool:
        if self.build.config.device != "auto":
            return self.build.config.device == "cpu"
        installation = self._installation()
        return installation is not None and installation.is_cpu
