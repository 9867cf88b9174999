"""A build: one engine on one model, resolved from a name, a YAML file, `git:REF` or `endpoint:URL`."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ConfigError
from ..run.records import Record
from .checkpoints import shipped_model
from .models import BuildConfig, ModelSource
from .yaml_files import load, locate

MODELS_OWN = "model"  # a draft_vocab: the file beside the checkpoint


class Build(Record):
    """Everything needed to start an engine, or to find one that runs already.

    model_source is None for an endpoint. pythonpath: folders put before the engine's own. git_commit: of the code the
    engine runs, None where that is an installed package.
    """

    name: str
    config: BuildConfig
    model_source: ModelSource | None = None
    pythonpath: tuple[str, ...] = ()
    git_commit: str | None = None
    git_dirty: bool | None = None

    @property
    def engine(self) -> str:
        """kernarc, vllm or endpoint."""
        return self.config.engine

    @property
    def num_speculative_tokens(self) -> int | None:
        """Drafts a step; None where only the server knows."""
        return self.config.num_speculative_tokens


def resolve_build(spec: str, default_model: ModelSource | None = None) -> Build:
    """NAME in configs/builds, PATH.yaml, `git:REF`, `endpoint:URL` or `endpoint:URL#MODEL`.

    default_model: for builds that name no model of their own; None: the tiny structured checkpoint.
    """
    if spec.startswith("endpoint:"):
        return _endpoint(spec)
    if spec.startswith("git:"):
        from .git_builds import resolve_git_build

        return resolve_git_build(spec.removeprefix("git:"), default_model)
    path = locate(spec, BuildConfig.folder)
    return build_from_config(path.stem, load(spec, BuildConfig), default_model, relative_to=path.parent)


def build_from_config(
    name: str, config: BuildConfig, default_model: ModelSource | None = None, *, relative_to: Path | None = None
) -> Build:
    """A build of a checked configuration; relative paths in it start at `relative_to`."""
    if config.engine == "endpoint":
        return Build(name=name, config=config)
    folder = relative_to or Path.cwd()
    model = config.model or default_model or ModelSource(synth="tiny")
    if config.model is not None:
        model = _absolute(model, folder, name)
    if config.python is not None:
        config = config.model_copy(update={"python": _interpreter(config.python, folder, name)})
    if config.draft_vocab not in (None, MODELS_OWN):
        config = config.model_copy(update={"draft_vocab": _path(str(config.draft_vocab), folder, name)})
    pythonpath = tuple(_path(entry, folder, name) for entry in config.pythonpath)
    return Build(name=name, config=config, model_source=model, pythonpath=pythonpath)


def resolve_builds(specs: Sequence[str], default_model: ModelSource | None = None) -> tuple[Build, ...]:
    """All builds of a run, each under a name of its own."""
    builds: list[Build] = []
    for spec in specs:
        build = resolve_build(spec, default_model)
        taken = {other.name for other in builds}
        number = 2
        name = build.name
        while name in taken:  # an A/A comparison names one build twice
            name = f"{build.name}-{number}"
            number += 1
        builds.append(build.model_copy(update={"name": name}))
    return tuple(builds)


def _absolute(model: ModelSource, folder: Path, build: str) -> ModelSource:
    if model.path is not None and shipped_model(model.path) is None:
        return model.model_copy(update={"path": _path(model.path, folder, build)})
    if model.synth is not None and ("/" in model.synth or model.synth.endswith(".json")):
        return model.model_copy(update={"synth": _path(model.synth, folder, build)})
    return model


def _interpreter(python: str, folder: Path, build: str) -> str:
    """A command on the search path stays one; a path is made absolute without following links (a venv is one)."""
    if "/" not in python and "$" not in python:
        return python
    return os.path.abspath(folder / Path(_expanded(python, build)).expanduser())


def _path(entry: str, folder: Path, build: str) -> str:
    """Absolute, from the build's own folder; ~ and $VARIABLE are filled in."""
    return str((folder / Path(_expanded(entry, build)).expanduser()).resolve())


def _expanded(entry: str, build: str) -> str:
    missing = [name for name in re.findall(r"\$\{?(\w+)", entry) if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{build}: {entry!r} needs the environment variable {missing[0]}, which is not set",
            f"export {missing[0]}=… and run it again",
        )
    return os.path.expandvars(entry)


def _endpoint(spec: str) -> Build:
    url, _, served_model = spec.removeprefix("endpoint:").partition("#")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{spec!r} names no server", "write endpoint:http://HOST:PORT or endpoint:http://HOST:PORT#MODEL_NAME"
        )
    config = BuildConfig(engine="endpoint", url=url.rstrip("/"), served_model=served_model or None)
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Build(name=f"{parts.netloc.rpartition('@')[2]}{path}", config=config)
