"""The house: what ships is what lies in the tree, and imports go one way."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import kernarc
import pytest

ROOT = Path(kernarc.__file__).parent
LAYERS = {
    "decoder": {"decoder"},
    "harness": {"harness"},
    "gates": {"gates", "harness"},
    "reports": {"reports", "gates", "harness"},
    "configs": set[str](),
}
COMMANDS = ("decoder/commands.py", "reports/commands/")  # the command line, on top of every layer


def _python_files(layer: str) -> Iterator[Path]:
    return (path for path in (ROOT / layer).rglob("*.py") if path.parent.name != "vllm_site")


def _imported_layers(path: Path) -> set[str]:
    """The top-level folders that a file's relative imports reach into; "" is the root package itself."""
    package = path.relative_to(ROOT).parent.parts
    layers = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - node.level + 1]
            layers.add([*above, *(node.module or "").split(".")][0])
    return layers - {""}


def test_the_packages_that_ship_are_those_of_the_tree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for layer in LAYERS for path in _python_files(layer)}
    names = {".".join(("kernarc", *folder.parts)) for folder in folders}
    assert settings["packages"] == sorted(names | {"kernarc"})


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(reached - LAYERS[layer])
        for path in _python_files(layer)
        if not str(path.relative_to(ROOT)).startswith(COMMANDS) and (reached := _imported_layers(path)) - LAYERS[layer]
    }
    assert wrong == {}


def test_every_folder_of_code_is_a_package() -> None:
    folders = {path.parent for layer in LAYERS for path in _python_files(layer)}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []
