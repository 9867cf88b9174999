"""Training text: the standard library's sources and permissively licensed packages, split by module.

The split needs no list: a standard-library module is held out when a hash of its name says so, so any Python
(3.11 or later) reproduces it, and the tests of a held-out module are kept out of training too.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from json import dumps, loads
from pathlib import Path

HELD_OUT_PERCENT = 9
SALT = "kernarc"
STANDARD_LIBRARY = "python"
SHINGLE_LINES = 4
MAX_SHARED_SHINGLES = 10
# Tables, generated code and non-modules: no program text to learn from.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data", "encodings"}
TEST_FOLDERS = {"test", "tests", "idle_test"}
# Names of licences (SPDX or classifier) under which text may be trained on.
PERMISSIVE = re.compile(
    r"(mit(-0|-cmu)?|isc|zlib|0bsd|bsd([- ][\w-]*)?|[23]-clause bsd license"
    r"|apache([- ]2\.0| 2\.0 license| software license)?|psf-2\.0|python software foundation license"
    r"|cc0-1\.0|bsl-1\.0|cnri-python|llvm-exception)( license)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Document:
    """One source file: `origin` is "python" or a package name, `module` the top-level module it belongs to."""

    origin: str
    version: str
    module: str
    path: str
    text: str
    licence: str = "PSF-2.0"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def is_held_out(module: str) -> bool:
    """Whether a top-level standard-library module belongs to the held-out split."""
    return int(hashlib.sha256((SALT + module).encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def looks_like_program(text: str) -> bool:
    """False for tables and generated files: very long lines, or few letters."""
    lines = text.count("\n") + 1
    letters = sum(map(str.isalpha, text[:20_000]))
    return 200 < len(text) < 600_000 and len(text) / lines < 120 and letters > 0.35 * min(len(text), 20_000)


def read_source(path: Path) -> str | None:
    """The file's text with its newlines as they are, or None where it is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return None


def standard_library_documents(root: Path, version: str) -> Iterator[Document]:
    """Every usable source of the standard library under `root`, sorted by path."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        text = read_source(path)
        if text is not None and looks_like_program(text):
            module = relative.parts[0].removesuffix(".py")
            yield Document(STANDARD_LIBRARY, version, module, relative.as_posix(), text)


def licence_names(distribution: metadata.Distribution) -> list[str]:
    """The licences that a distribution's own metadata names."""
    fields = distribution.metadata
    expression = (fields.get_all("License-Expression") or [""])[0]
    if expression:
        return [n.strip() for n in re.split(r"\s+(?:AND|OR|WITH)\s+", re.sub(r"[()]", " ", expression).strip())]
    classifiers = [c for c in fields.get_all("Classifier") or () if c.startswith("License ::")]
    return [c.rsplit("::", 1)[-1].strip() for c in classifiers] or [(fields.get_all("License") or [""])[0].strip()]


def is_permissive(distribution: metadata.Distribution) -> bool:
    """Whether every licence that the distribution's own metadata names is permissive (none named: no)."""
    return all(PERMISSIVE.fullmatch(name) for name in licence_names(distribution))


def package_documents(site_packages: Path) -> Iterator[Document]:
    """Every usable source of the permissively licensed distributions installed in `site_packages`."""
    for distribution in sorted(metadata.distributions(path=[str(site_packages)]), key=lambda d: d.name.lower()):
        if not is_permissive(distribution):
            continue
        licence = " AND ".join(licence_names(distribution))
        for file in sorted(distribution.files or (), key=str):
            if file.suffix != ".py" or ".." in file.parts or "__pycache__" in file.parts:
                continue
            path = site_packages / file
            text = read_source(path) if path.is_file() else None
            if text is not None and looks_like_program(text):
                yield Document(distribution.name, distribution.version, file.parts[0], file.as_posix(), text, licence)


def tested_module(path: str) -> str:
    """For a test file the first component of what it tests: test/test_json/test_dump.py -> json."""
    parts = Path(path).parts
    if parts[0] != "test" or len(parts) < 2:
        return parts[0].removesuffix(".py")
    return parts[1].removesuffix(".py").removeprefix("test_")


def belongs_to(module: str, held_out: set[str]) -> bool:
    """Whether a module or test name is a held-out module, its C or Python half, or a longer name of its test."""
    name = module.lstrip("_")
    return any(name == held.lstrip("_") or name.startswith(held.lstrip("_") + "_") for held in held_out)


def shingles(text: str) -> set[int]:
    """Hashes of every run of four non-blank lines, indentation ignored."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {hash("\n".join(lines[i : i + SHINGLE_LINES])) for i in range(len(lines) - SHINGLE_LINES + 1)}


@dataclass(frozen=True)
class Corpus:
    """The two sides of the split, and how many files were dropped from training for repeating held-out text."""

    training: list[Document]
    held_out: list[Document]
    dropped_duplicates: int
    dropped_overlaps: int


def split(documents: Iterable[Document], held_out_version: str) -> Corpus:
    """Splits by module; training loses exact copies, held-out modules' tests, and files that repeat held-out lines.

    Only `held_out_version` of Python gives held-out text; held-out modules of other versions are not used at all.
    """
    everything = list(documents)
    in_library = [d for d in everything if d.origin == STANDARD_LIBRARY]
    names = {d.module for d in in_library if d.module not in TEST_FOLDERS and is_held_out(d.module)}
    held_out = [
        d
        for d in in_library
        if d.version == held_out_version and d.module in names and not TEST_FOLDERS.intersection(Path(d.path).parts)
    ]
    forbidden = set().union(*(shingles(d.text) for d in in_library if d.module in names))
    training: list[Document] = []
    seen: set[str] = set()
    duplicates = overlaps = 0
    for document in everything:
        if document.origin == STANDARD_LIBRARY and belongs_to(tested_module(document.path), names):
            continue
        if document.sha256 in seen:
            duplicates += 1
        elif len(shingles(document.text) & forbidden) >= MAX_SHARED_SHINGLES:
            overlaps += 1
        else:
            seen.add(document.sha256)
            training.append(document)
    return Corpus(training, held_out, duplicates, overlaps)


def running_version() -> str:
    """The running Python's version, such as 3.12.3."""
    return ".".join(map(str, sys.version_info[:3]))


def installed_documents() -> Iterator[Document]:
    """What the running interpreter has: its standard library and its permissive packages."""
    paths = sysconfig.get_paths()
    yield from standard_library_documents(Path(paths["stdlib"]), running_version())
    for site_packages in sorted({paths["purelib"], paths["platlib"]}):
        yield from package_documents(Path(site_packages))


def held_out_list(corpus: Corpus) -> dict[str, object]:
    """What heldout.json holds: the rule, the module names, and the hash of every file that was read."""
    return {
        "rule": f"sha256({SALT!r} + top-level module name), first 8 hex digits, % 100 < {HELD_OUT_PERCENT}",
        "python": sorted({d.version for d in corpus.held_out}),
        "modules": sorted({d.module for d in corpus.held_out}),
        "files": [{"path": d.path, "bytes": len(d.text.encode()), "sha256": d.sha256} for d in corpus.held_out],
    }


def describe(corpus: Corpus) -> dict[str, object]:
    """What the card says about the training text: sizes, versions, and each package with its licence."""
    sizes: dict[tuple[str, str, str], int] = defaultdict(int)
    for document in corpus.training:
        sizes[(document.origin, document.version, document.licence)] += len(document.text.encode())
    library = {key: size for key, size in sizes.items() if key[0] == STANDARD_LIBRARY}
    packages = {key: size for key, size in sizes.items() if key[0] != STANDARD_LIBRARY}
    return {
        "library_versions": sorted(version for _, version, _ in library),
        "library_bytes": sum(library.values()),
        "package_bytes": sum(packages.values()),
        "dropped_duplicates": corpus.dropped_duplicates,
        "dropped_overlaps": corpus.dropped_overlaps,
        "packages": [
            {"name": name, "version": version, "licence": licence, "bytes": size}
            for (name, version, licence), size in sorted(packages.items())
        ],
    }


def write_shards(documents: list[Document], folder: Path, prefix: str, shards: int) -> None:
    """Writes documents as xz-compressed JSON lines, cut into `shards` files of consecutive documents."""
    folder.mkdir(parents=True, exist_ok=True)
    per_shard = -(-len(documents) // shards)
    jobs = [
        (folder / f"{prefix}-{index:02d}.jsonl.xz", documents[index * per_shard : (index + 1) * per_shard])
        for index in range(shards)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # lzma works without the interpreter's lock
        list(pool.map(_write_shard, jobs))


def _write_shard(job: tuple[Path, list[Document]]) -> None:
    path, documents = job
    path.write_bytes(lzma.compress("\n".join(dumps(asdict(d)) for d in documents).encode(), preset=9))


def read_shard(path: Path) -> list[Document]:
    """The documents of one shard."""
    return [Document(**loads(line)) for line in lzma.decompress(path.read_bytes()).decode().split("\n") if line]
