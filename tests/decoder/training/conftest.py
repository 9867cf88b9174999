"""A small corpus, and a model that a smoke run trained on it."""

from json import dumps
from pathlib import Path

import pytest
from kernarc.decoder.training import train
from kernarc.decoder.training.corpus import Corpus, Document, describe, write_shards


def source(number: int) -> str:
    """A module that no other number gives."""
    body = "".join(f"    if value == {n}:\n        return self.items[{n * number}]\n" for n in range(40))
    return f'"""Module {number}."""\n\n\ndef find_{number}(self, value):\n{body}'


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prepare writes, without its tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    training = [Document("python", "3.13.0", f"m{n}", f"m{n}.py", source(n)) for n in range(12)]
    held_out = [Document("python", "3.13.0", "shutil", f"shutil/{n}.py", source(100 + n)) for n in range(3)]
    write_shards(training, folder, "library", 1)
    write_shards(held_out, folder, "heldout", 1)
    (folder / "manifest.json").write_text(dumps(describe(Corpus(training, held_out, 0, 0))))
    return folder


def smoke(corpus_folder: Path, out: Path) -> Path:
    """A smoke run of six steps of text and one with rollouts."""
    arguments = ["--smoke", "--steps", "6", "--unloop-steps", "1", "--corpus", str(corpus_folder), "--out", str(out)]
    train.main(arguments, standalone_mode=False)
    return out


@pytest.fixture(scope="session")
def trained(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a smoke run leaves."""
    return smoke(corpus_folder, tmp_path_factory.mktemp("trained") / "first")
