"""`kernarc-gate config`: show or check builds, benches and gates."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ...harness.config.yaml_files import ConfigModel

JSON_FLAG = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group("config")
def config() -> None:
    """Show or check a configuration: a shipped name, benches/NAME, or a path."""


@config.command("show")
@click.argument("name", metavar="NAME|PATH")
@JSON_FLAG
def config_show(name: str, as_json: bool) -> None:
    """The effective values, defaults included."""
    from ...harness.config.yaml_files import to_yaml

    found = _find(name)
    if as_json:
        click.echo(json.dumps({str(path): json.loads(model.model_dump_json()) for path, model in found}))
        return
    for path, model in found:
        click.echo(f"# {path}\n{to_yaml(model)}".rstrip())


@config.command("check")
@click.argument("names", metavar="[NAME|PATH]...", nargs=-1)
@JSON_FLAG
def config_check(names: tuple[str, ...], as_json: bool) -> None:
    """Check configurations, every shipped one where none is named; exit code 2 where one cannot be used."""
    from ...harness.errors import ConfigError

    rows = []
    for name in names or _shipped():
        try:
            checked = [_check(path, model) for path, model in _find(name)]
            rows.append({"name": name, "ok": True, "says": "; ".join(checked)})
        except ConfigError as error:
            rows.append({"name": name, "ok": False, "says": str(error)})
    if as_json:
        click.echo(json.dumps({"configurations": rows}))
    else:
        for row in rows:
            click.echo(f"{'ok ' if row['ok'] else 'BAD'} {row['name']}: {row['says']}")
    sys.exit(0 if all(row["ok"] for row in rows) else 2)


@config.command("schema")
@click.argument("kind", type=click.Choice(["benches", "gates", "builds"]))
def config_schema(kind: str) -> None:
    """The JSON Schema of a kind of configuration, for editors that complete and check YAML by one."""
    click.echo(json.dumps(_kinds()[kind].model_json_schema(), indent=2))


def _kinds() -> dict[str, "type[ConfigModel]"]:
    from ...gates.config import GateConfig
    from ...harness.config.models import BenchConfig, BuildConfig

    return {model.folder: model for model in (BenchConfig, GateConfig, BuildConfig)}


def _shipped() -> tuple[str, ...]:
    from ...harness.config.yaml_files import names

    return tuple(f"{folder}/{name}" for folder in _kinds() for name in names(folder))


def _find(name: str) -> "list[tuple[Path, ConfigModel]]":
    """Every configuration that a name stands for ("default" is a bench and a gate), or the one at a path."""
    from ...harness.config.yaml_files import load, locate, names
    from ...harness.errors import ConfigError

    kinds = _kinds()
    folder, _, plain = name.rpartition("/")
    if folder in kinds and plain in names(folder):
        return [(locate(plain, folder), load(plain, kinds[folder]))]
    if folder or name.endswith((".yaml", ".yml")):
        path = locate(name, "benches")
        return [(path, load(path, _kind_of(path)))]
    found = [(locate(name, folder), load(name, model)) for folder, model in kinds.items() if name in names(folder)]
    if not found:
        raise ConfigError(f"there is no configuration named {name!r}", f"shipped ones: {', '.join(_shipped())}")
    return found


def _kind_of(path: Path) -> "type[ConfigModel]":
    """By its folder's name, else by the keys that only one kind has."""
    from ...harness.config.yaml_files import top_level_keys

    kinds = _kinds()
    if path.parent.name in kinds:
        return kinds[path.parent.name]
    keys = top_level_keys(path)
    if "engine" in keys:
        return kinds["builds"]
    return kinds["benches"] if "builds" in keys else kinds["gates"]


def _check(path: Path, model: "ConfigModel") -> str:
    """Beyond the schema: every build that a bench names has a configuration of its own. Returns what it is."""
    from ...harness.config.builds import resolve_build
    from ...harness.config.models import BenchConfig, BuildConfig
    from ...harness.config.yaml_files import load

    if not isinstance(model, BenchConfig):
        return f"{path}: a {model.folder.removesuffix('s')}"
    for spec in (*model.builds, *model.builds_without_vllm):
        if spec.startswith(("endpoint:", "git:")):
            resolve_build(spec)
        else:
            load(spec, BuildConfig)  # not resolved: the variables of its paths may be another machine's
    return f"{path}: a bench of {', '.join(model.builds)} at {len(model.depths)} depths"
