"""Which class starts which engine."""

from ..config.builds import Build
from ..errors import ConfigError
from .base import Engine
from .kernarc import KernarcEngine
from .vllm import VllmEngine

ENGINES: dict[str, type[Engine]] = {"kernarc": KernarcEngine, "vllm": VllmEngine}


def engine_of(build: Build, max_context: int) -> Engine:
    """The engine of a build that we start; max_context in tokens."""
    if build.engine not in ENGINES:
        raise ConfigError(f"{build.name}: engine {build.engine!r} is not started by us")
    return ENGINES[build.engine](build, max_context)
