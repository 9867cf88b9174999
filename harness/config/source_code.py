"""Which code an interpreter would import as `kernarc`: asked of that interpreter, never assumed to be ours."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..environment import LIBRARIES, git_state, own_library_versions

ASK_LIMIT_S = 60.0
CODE = (".py", ".cu", ".cuh", ".c", ".cpp", ".h")
ASK = f"""
import importlib.metadata, json, platform, sys
import kernarc
versions = {{"python": platform.python_version()}}
for name in {LIBRARIES!r}:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps([list(kernarc.__path__)[0], getattr(kernarc, "__version__", None), versions]))
"""


@dataclass(frozen=True)
class SourceCode:
    """The code of one build. What nobody can say is None.

    sha256: over the files of the package and its subpackages. library_versions: of what it computes with, where that
    is not our own environment.
    """

    version: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    sha256: str | None = None
    library_versions: Mapping[str, str] = field(default_factory=dict)


def imported_code(python: str, environment: Mapping[str, str]) -> SourceCode:
    """Of the package `kernarc` that `python` finds with these variables on top of ours."""
    try:
        result = subprocess.run(
            [python, "-c", ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            timeout=ASK_LIMIT_S,
            check=True,
        )
        package, version, versions = json.loads(result.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        return SourceCode()  # starting it will say what is wrong with it
    folder = Path(package).resolve()
    ours = {"python": platform.python_version(), **own_library_versions()}
    commit, dirty = git_state(folder)
    return SourceCode(version, commit, dirty, sources_sha256(folder), {} if versions == ours else versions)


def sources_sha256(package: Path) -> str:
    """Over names and contents of the code of a package and its subpackages; the same for a checkout and its wheel."""
    digest = hashlib.sha256()
    for path in sorted(_code_files(package)):
        content = hashlib.sha256(path.read_bytes()).digest()
        digest.update(f"{path.relative_to(package)}\0".encode() + content)
    return digest.hexdigest()


def _code_files(package: Path) -> Iterator[Path]:
    for entry in package.iterdir():
        if entry.is_dir():
            if (entry / "__init__.py").is_file() and not entry.is_symlink():
                yield from _code_files(entry)
        elif entry.suffix in CODE and entry.is_file():
            yield entry
