"""YAML to a checked, frozen configuration. Every refusal names the file, the line, the key and what was expected."""

import difflib
import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from ..errors import ConfigError

Location = tuple[int | str, ...]


class ConfigModel(BaseModel):
    """Base of every configuration section: frozen, strict, closed, finite. folder: where named ones ship."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    folder: ClassVar[str] = ""


M = TypeVar("M", bound=ConfigModel)


def load(name_or_path: str | Path, model: type[M]) -> M:
    """Reads a configuration by shipped name ("default") or by path (anything ending in .yaml, or holding a slash)."""
    path = locate(name_or_path, model.folder)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return parse(text, model, str(path))


def locate(name_or_path: str | Path, folder: str) -> Path:
    """The file a name or path stands for."""
    text = str(name_or_path)
    if "/" in text or text.endswith((".yaml", ".yml")):
        path = Path(text).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no file {path}", f"shipped {folder}: {', '.join(names(folder))}")
        return path
    path = shipped_folder(folder) / f"{text}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"there is no configuration named {text!r} in configs/{folder}{_did_you_mean(text, names(folder))}",
            f"shipped ones: {', '.join(names(folder))}; or give a path to a YAML file",
        )
    return path


def names(folder: str) -> list[str]:
    """The shipped configurations of one folder (builds, benches, gates), sorted."""
    directory = shipped_folder(folder)
    return sorted(path.stem for path in directory.glob("*.yaml")) if directory.is_dir() else []


def top_level_keys(path: Path) -> set[str]:
    """The keys of a YAML file, to tell what kind of configuration it is; empty where it is not one."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_PlainLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return set()
    return {str(key.value) for key, _ in node.value} if isinstance(node, yaml.MappingNode) else set()


def parse(text: str, model: type[M], source: str) -> M:
    """Checks YAML text against a model; source is what errors call the file."""
    lines: dict[Location, int] = {}
    try:
        node = yaml.compose(text, Loader=_PlainLoader)
        data = {} if node is None else _plain(node, (), lines, source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{at}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}, line 1: expected keys and values, got {data!r}")

    def where(location: Location) -> tuple[int, str]:
        line = _line_of(location, lines)
        return line, f"{source}, line {line}: "

    return _validated(data, model, where)


_FLAGS = {"requests_per_depth": "requests"}  # named otherwise than their key


def override(config: M, changes: Mapping[str, object]) -> M:
    """The configuration with some keys replaced by command-line flags (None: flag not given), checked again."""
    given = {key: value for key, value in changes.items() if value is not None}
    if not given:
        return config
    data = {**json.loads(config.model_dump_json()), **given}

    def where(location: Location) -> tuple[int, str]:
        return 0, f"--{_FLAGS.get(str(location[0]), str(location[0]).replace('_', '-'))}: " if location else ""

    return _validated(data, type(config), where)


def to_yaml(config: BaseModel) -> str:
    """The effective values, as YAML that `load` reads back."""
    return yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False, allow_unicode=True)


class _PlainLoader(yaml.SafeLoader):
    """Scalars as JSON knows them: dates stay text."""


_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _plain(node: yaml.Node, location: Location, lines: dict[Location, int], source: str) -> Any:
    """The node's value as plain data; fills in the line of every key and item, refuses duplicate keys."""
    lines.setdefault(location, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*location, index), lines, source) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _PlainLoader("").construct_object(node)
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key == "<<":
            raise ConfigError(f"{source}, line {line}: expected a plain key")
        if key in mapping:
            first = lines[(*location, key)]
            raise ConfigError(
                f"{source}, line {line}: {key!r} is given twice (first in line {first})", "keep one of them"
            )
        lines[(*location, key)] = line
        mapping[key] = _plain(value_node, (*location, key), lines, source)
    return mapping


def _validated(data: dict[str, Any], model: type[M], where: Callable[[Location], tuple[int, str]]) -> M:
    """where: the line to sort by and the words to begin with, for a problem's location."""
    try:
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problems = sorted((where(problem["loc"]), _explain(problem, model)) for problem in _causes(error))
        message = "\n".join(prefix + explanation for (_, prefix), explanation in problems)
        raise ConfigError(message, "nothing was started; correct it and run again") from error


def _causes(error: ValidationError) -> list[ErrorDetails]:
    """The problems, less lists called too short because their items were refused."""
    found = error.errors()
    parents = {problem["loc"][:-1] for problem in found}
    return [problem for problem in found if problem["type"] != "too_short" or problem["loc"] not in parents]


def _explain(problem: ErrorDetails, model: type[BaseModel]) -> str:
    location = problem["loc"]
    key = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        known = list(_model_at(model, location[:-1]).model_fields)
        return f"unknown key {key!r}{_did_you_mean(str(location[-1]), known)} (known keys: {', '.join(known)})"
    if problem["type"] == "missing":
        return f"{key!r} is required and missing"
    expected = problem["msg"].removeprefix("Value error, ")
    if not location:
        return expected
    got = problem["input"]
    return f"{key!r}: {expected[0].lower() + expected[1:]}, got {got!r}{_unit_hint(location, got)}"


_UNITS_IN = {
    "_s": {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600},
    "_ms": {"ms": 1, "s": 1000, "us": 0.001},
    "_bytes": {"b": 1, "kb": 1000, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30},
    "": {"k": 1024, "%": 0.01},
}


def _unit_hint(location: Location, value: object) -> str:
    """For "30s" where seconds are wanted as a number: what to write instead."""
    written = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z%]+)\s*", value) if isinstance(value, str) else None
    key = next((part for part in reversed(location) if isinstance(part, str)), "")
    if written is None:
        return ""
    suffix = next((suffix for suffix in _UNITS_IN if suffix and key.endswith(suffix)), "")
    factor = _UNITS_IN[suffix].get(written[2].lower())
    if factor is None:
        return ""
    return f": the unit is in the key, write {float(written[1]) * factor:g}"


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel]:
    for part in location:
        if not isinstance(part, str) or part not in model.model_fields:
            continue
        nested = _nested_model(model.model_fields[part].annotation)
        if nested is not None:
            model = nested
    return model


def _nested_model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    nested = (_nested_model(argument) for argument in get_args(annotation))
    return next((found for found in nested if found is not None), None)


def _line_of(location: Location, lines: Mapping[Location, int]) -> int:
    while location and location not in lines:
        location = location[:-1]
    return lines.get(location, 1)


def _did_you_mean(word: str, known: Sequence[Hashable]) -> str:
    nearest = difflib.get_close_matches(word, [str(name) for name in known], n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def shipped_folder(folder: str) -> Path:
    """Where the package keeps its builds, benches, gates and models."""
    return Path(str(resources.files(f"{(__package__ or '').partition('.')[0]}.configs"))) / folder
