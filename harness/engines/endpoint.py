"""A server that somebody else started: any OpenAI-compatible URL."""

import os

from ..config.builds import Build
from ..errors import ConfigError, EngineError
from .base import RunningEngine, first_model, responds


def api_headers(build: Build) -> dict[str, str]:
    """The Authorization header where the build names a variable that holds a key."""
    key = api_key(build)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def api_key(build: Build) -> str | None:
    """The key itself; ConfigError where its variable is not set."""
    variable = build.config.api_key_variable
    if variable is None:
        return None
    if variable not in os.environ:
        raise ConfigError(f"{build.name}: the environment variable {variable} is not set", f"export {variable}=KEY")
    return os.environ[variable]


def connect(build: Build) -> RunningEngine:
    """The running server of an endpoint build. EngineError where it does not answer."""
    url = build.config.url or ""
    headers = api_headers(build)
    name = build.config.served_model
    if not responds(url, headers):
        raise EngineError(f"no OpenAI-compatible server answers at {url}", "start it, or correct the URL")
    return RunningEngine(build, url, name or first_model(url, headers), 0.0, headers=headers)
