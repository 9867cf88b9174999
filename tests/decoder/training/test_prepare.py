"""The corpus command: text, licences and tokenizer in one folder, from libraries and packages that it is given."""

from json import loads
from pathlib import Path

import pytest
from kernarc.decoder.errors import DecoderError
from kernarc.decoder.training import prepare
from kernarc.decoder.training.packages import PINNED
from kernarc.decoder.training.streams import read_corpus
from tokenizers import Tokenizer

from .conftest import source


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    folder.mkdir()
    for number, name in enumerate(("json", "shutil", "queue")):
        (folder / f"{name}.py").write_text(source(number + 1))
    return folder


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    for number, (name, licence) in enumerate((("open", "MIT"), ("closed", "LicenseRef-Proprietary"))):
        record = folder / f"{name}-1.2.dist-info"
        record.mkdir(parents=True)
        (record / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.2\nLicense-Expression: {licence}\n"
        )
        (record / "RECORD").write_text(f"{name}.py,,\n")
        (folder / f"{name}.py").write_text(source(number + 50))
    return folder


def test_one_command_writes_text_licences_and_tokenizer(library: Path, site_packages: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    arguments = ["--out", str(out), "--library", f"3.13.0={library}", "--packages", str(site_packages)]
    prepare.main(arguments, standalone_mode=False)
    corpus = read_corpus(out, 1)
    assert [d.path for d in corpus.training] == ["json.py", "queue.py", "open.py"]
    assert [d.path for d in corpus.held_out] == ["shutil.py"]
    manifest = loads((out / "manifest.json").read_text())
    size = len(source(50).encode())
    assert manifest["packages"] == [{"name": "open", "version": "1.2", "licence": "MIT", "bytes": size}]
    assert loads((out / "heldout.json").read_text())["modules"] == ["shutil"]
    text = source(9)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_folder_without_a_library_is_refused(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path / "out"), "--library", f"3.13.0={tmp_path}", "--packages", str(tmp_path)]
    with pytest.raises(DecoderError, match="holds no standard library"):
        prepare.main(arguments, standalone_mode=False)


def test_a_package_that_cannot_be_installed_is_told_in_pip_s_words(tmp_path: Path) -> None:
    with pytest.raises(DecoderError, match="Invalid requirement"):
        prepare.install(["not a requirement"], tmp_path)


def test_every_package_is_pinned() -> None:
    assert all(len(name.split("==")) == 2 for name in PINNED)
    assert len(set(PINNED)) == len(PINNED)
