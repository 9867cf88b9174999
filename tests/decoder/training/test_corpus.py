"""The split: reproducible, by module, without copies across it; and only permissive licences."""

from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
from kernarc.decoder.training.corpus import (
    Document,
    describe,
    held_out_list,
    is_held_out,
    is_permissive,
    read_shard,
    split,
    standard_library_documents,
    write_shards,
)


def document(path: str, text: str, origin: str = "python", version: str = "3.13.0") -> Document:
    return Document(origin, version, Path(path).parts[0].removesuffix(".py"), path, text)


def text_of(seed: str, lines: int = 30) -> str:
    return "\n".join(f"def {seed}_{n}(argument):\n    return argument + {n}" for n in range(lines)) + "\n"


def test_split_by_module_keeps_tests_copies_and_other_versions_out_of_training() -> None:
    assert is_held_out("shutil")
    assert not is_held_out("json")
    documents = [
        document("shutil.py", text_of("move")),
        document("shutil.py", text_of("move") + "# older\n", version="3.11.7"),
        document("json/decoder.py", text_of("decode")),
        document("test/test_shutil.py", text_of("test_move")),
        document("test/test_json.py", text_of("test_decode")),
        document("vendored/_shutil.py", "# vendored\n" + text_of("move"), origin="package"),
        document("package/json.py", text_of("decode"), origin="package"),
        document("package/own.py", text_of("own"), origin="package"),
    ]
    corpus = split(documents, "3.13.0")
    assert [d.path for d in corpus.held_out] == ["shutil.py"]
    assert [d.path for d in corpus.training] == ["json/decoder.py", "test/test_json.py", "package/own.py"]
    assert (corpus.dropped_duplicates, corpus.dropped_overlaps) == (1, 1)
    listed = held_out_list(corpus)
    assert listed["modules"] == ["shutil"]
    assert describe(corpus)["library_versions"] == ["3.13.0"]


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"License-Expression": "MIT"}, True),
        ({"License-Expression": "(MIT OR Apache-2.0) AND BSD-3-Clause"}, True),
        ({"License-Expression": "MIT AND GPL-3.0-or-later"}, False),
        ({"License-Expression": "MPL-2.0"}, False),
        ({"Classifier": "License :: OSI Approved :: BSD License"}, True),
        ({"Classifier": "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"}, False),
        ({"License": "Apache 2.0 License"}, True),
        ({"License": "see the file"}, False),
        ({}, False),
    ],
)
def test_licences(headers: dict[str, str], allowed: bool) -> None:
    class Installed(metadata.Distribution):
        def read_text(self, filename: str) -> str | None:
            message = Message()
            for name, value in headers.items():
                message[name] = value
            return message.as_string() if filename == "METADATA" else None

        def locate_file(self, path: object) -> Path:
            raise NotImplementedError

    assert is_permissive(Installed()) is allowed


def test_reading_a_library_and_writing_it_as_shards(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    for name, content in {
        "json/tool.py": text_of("tool"),
        "site-packages/other.py": text_of("other"),
        "tiny.py": "x = 1\n",
        "table.py": "x = [" + "0x1f, " * 500 + "]\n",
    }.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(content)
    (library / "latin.py").write_bytes(text_of("old").encode() + b"# \xe9\n")
    documents = list(standard_library_documents(library, "3.12.0"))
    assert [d.path for d in documents] == ["json/tool.py"]
    write_shards(documents * 3, tmp_path / "shards", "library", 2)
    read = [d for path in sorted((tmp_path / "shards").iterdir()) for d in read_shard(path)]
    assert read == documents * 3
