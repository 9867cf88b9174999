"""`python -m kernarc.decoder.training.prepare --out DIR`: gathers the training text, its licences and its tokenizer.

Reads one or more standard libraries, installs the packages of packages.py (pinned, without what they depend on) into a
folder of their own, keeps those whose own metadata names only permissive licences, splits by module, and writes
compressed text with manifest.json (every package, version, licence and size), heldout.json and tokenizer.json.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from itertools import chain
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from ..errors import DecoderError
from .corpus import (
    STANDARD_LIBRARY,
    Corpus,
    Document,
    describe,
    held_out_list,
    package_documents,
    running_version,
    split,
    standard_library_documents,
    write_shards,
)
from .packages import PINNED
from .progress import say
from .shape import SHIPPED
from .tokenizer import train_tokenizer

TOKENIZER_EVERY = 3  # one training file in three is enough to count pairs of 4,096 tokens


def install(pinned: Sequence[str], site_packages: Path) -> None:
    """Installs exactly these packages into a folder; DecoderError with pip's own words where that fails."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]
    done = subprocess.run([*command, "--target", str(site_packages), *pinned], capture_output=True, text=True)
    if done.returncode:
        raise DecoderError(
            f"pip could not install the pinned packages:\n{done.stderr.strip()[-2000:]}",
            "correct packages.py, or name folders of installed packages with --packages",
        )


def _library(argument: str) -> list[Document]:
    version, _, folder = argument.partition("=")
    documents = list(standard_library_documents(Path(folder), version))
    if not documents:
        raise DecoderError(f"{folder!r} holds no standard library", "give --library VERSION=DIR, such as 3.13.0=…")
    return documents


def gather(libraries: Sequence[str], packages: Sequence[Path]) -> Corpus:
    """The split text of these libraries (the first gives the held-out text) and of these folders' packages."""
    documents = list(chain.from_iterable(map(_library, libraries)))
    documents += chain.from_iterable(map(package_documents, packages))
    return split(documents, libraries[0].partition("=")[0])


def write(corpus: Corpus, out: Path) -> None:
    """Text, tokenizer, held-out list and manifest."""
    # Near-copies (one file in three versions) lie side by side here, which xz needs; training puts them apart again.
    library = [d for d in corpus.training if d.origin == STANDARD_LIBRARY]
    packages = [d for d in corpus.training if d.origin != STANDARD_LIBRARY]
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.jsonl.xz"):
        old.unlink()
    texts = (d.text for d in corpus.training[::TOKENIZER_EVERY])
    (out / "tokenizer.json").write_text(train_tokenizer(texts, SHIPPED.vocab_size).to_str() + "\n")
    say("tokenizer written")
    write_shards(corpus.held_out, out, "heldout", 1)
    write_shards(sorted(library, key=lambda d: (d.path, d.version)), out, "library", 6)
    write_shards(sorted(packages, key=lambda d: (d.origin, d.path)), out, "packages", 26)
    for name, content in (("heldout", held_out_list(corpus)), ("manifest", describe(corpus))):
        (out / f"{name}.json").write_text(dumps(content, indent=2) + "\n")


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option(
    "--library",
    "libraries",
    multiple=True,
    metavar="VERSION=DIR",
    help="a standard library; the first gives the held-out text (default: the running interpreter's)",
)
@click.option(
    "--packages",
    multiple=True,
    metavar="SITE_PACKAGES",
    type=click.Path(path_type=Path),
    help="a folder of installed packages (default: packages.py, installed for this into a temporary folder)",
)
def main(out: Path, libraries: tuple[str, ...], packages: tuple[Path, ...]) -> None:
    """Command line."""
    libraries = libraries or (f"{running_version()}={sysconfig.get_paths()['stdlib']}",)
    with TemporaryDirectory() as temporary:
        if not packages:
            install(PINNED, Path(temporary))
            say(f"{len(PINNED)} packages installed")
        corpus = gather(libraries, packages or [Path(temporary)])
    say(f"{len(corpus.training):,} files to train on, {len(corpus.held_out)} held out")
    write(corpus, out)
    size = sum(path.stat().st_size for path in out.iterdir())
    say(f"{size / 1e6:.1f} MB in {out}")


if __name__ == "__main__":
    main()
