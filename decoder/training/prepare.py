"""`python -m kernarc.decoder.training.prepare --out DIR`: gathers the text once, to carry it to a GPU host.

Training reads installed packages itself; this is for a host whose Python lacks the tests or the packages.
"""

from __future__ import annotations

import argparse
from itertools import chain
from json import dumps
from pathlib import Path

from .corpus import (
    STANDARD_LIBRARY,
    Document,
    describe,
    held_out_list,
    installed_documents,
    package_documents,
    split,
    standard_library_documents,
    write_shards,
)


def _library(argument: str) -> list[Document]:
    version, _, folder = argument.partition("=")
    return list(standard_library_documents(Path(folder), version))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m kernarc.decoder.training.prepare", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--library",
        action="append",
        metavar="VERSION=DIR",
        default=[],
        help="a standard library; the first gives the held-out text (default: the running interpreter's)",
    )
    parser.add_argument("--packages", action="append", metavar="SITE_PACKAGES", type=Path, default=[])
    arguments = parser.parse_args()
    if arguments.library:
        documents = list(chain.from_iterable(map(_library, arguments.library)))
        documents += chain.from_iterable(map(package_documents, arguments.packages))
    else:
        documents = list(installed_documents())
    version = next(d.version for d in documents if d.origin == STANDARD_LIBRARY)
    corpus = split(documents, version)
    # Near-copies (one file in three versions) lie side by side here, which xz needs; training puts them apart again.
    library = [d for d in corpus.training if d.origin == STANDARD_LIBRARY]
    packages = [d for d in corpus.training if d.origin != STANDARD_LIBRARY]
    write_shards(corpus.held_out, arguments.out, "heldout", 1)
    write_shards(sorted(library, key=lambda d: (d.path, d.version)), arguments.out, "library", 6)
    write_shards(sorted(packages, key=lambda d: (d.origin, d.path)), arguments.out, "packages", 26)
    for name, content in (("heldout", held_out_list(corpus)), ("manifest", describe(corpus))):
        (arguments.out / f"{name}.json").write_text(dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
