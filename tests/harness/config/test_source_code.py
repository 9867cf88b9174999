"""A build's record speaks of the code that the build runs, which need not be the code that measures it."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kernarc
import pytest
from kernarc.harness.config.builds import Build
from kernarc.harness.config.checkpoints import ensure_checkpoint
from kernarc.harness.config.source_code import SourceCode, imported_code, sources_sha256
from kernarc.harness.engines.registry import build_record
from kernarc.harness.run.records import BuildRecord

MakeBuild = Callable[..., Build]


@pytest.fixture
def code(fake_build: MakeBuild, tmp_path: Path) -> Path:
    """A folder for a build's pythonpath, outside any checkout."""
    shutil.copytree(fake_build().pythonpath[0], tmp_path / "code", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "code"


def record_of(build: Build) -> BuildRecord:
    assert build.model_source is not None
    return build_record(build, ensure_checkpoint(build.model_source, lambda _: None), 200)


def test_code_of_no_checkout_has_no_commit_and_no_version_of_ours(fake_build: MakeBuild, code: Path) -> None:
    build = fake_build().model_copy(update={"pythonpath": (str(code),)})
    first = record_of(build)
    assert (first.git_commit, first.git_dirty, first.engine_version) == (None, None, None)
    (code / "kernarc" / "cli.py").write_text("changed")
    (code / "kernarc" / "__init__.py").write_text("__version__ = '9.9'\n")
    second = record_of(build)
    assert second.engine_version == "9.9"
    assert second.sources_sha256 not in (None, first.sources_sha256)


def test_code_of_a_checkout_has_that_checkout_s_commit(fake_build: MakeBuild, code: Path) -> None:
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qmx"]):
        subprocess.run(["git", "-C", str(code), *command], check=True)
    head = subprocess.run(["git", "-C", str(code), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    build = fake_build().model_copy(update={"pythonpath": (str(code),)})
    record = record_of(build)
    assert (record.git_commit, record.git_dirty) == (head.stdout.strip(), False)
    (code / "kernarc" / "cli.py").write_text("changed")
    assert record_of(build).git_dirty is True


def test_another_interpreter_is_asked_what_it_would_import(code: Path, tmp_path: Path) -> None:
    """A package found through the interpreter's own site folder, as where `python` names an environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "other.pth").write_text(f"{code}\n")
    (code / "kernarc" / "__init__.py").write_text("__version__ = '8.8'\n")
    found = imported_code(str(tmp_path / "venv" / "bin" / "python"), {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"})
    assert (found.version, found.git_commit) == ("8.8", None)
    assert found.sha256 == sources_sha256(code / "kernarc")
    assert list(found.library_versions) == ["python"], "an empty environment has none of our libraries"


def test_our_own_code_is_recognised(fake_build: MakeBuild) -> None:
    ours = record_of(fake_build().model_copy(update={"pythonpath": ()}))
    assert ours.engine_version == kernarc.__version__
    assert ours.sources_sha256 == sources_sha256(Path(kernarc.__file__).parent)
    assert ours.library_versions == {}


def test_what_cannot_be_asked_is_not_known(code: Path) -> None:
    (code / "kernarc" / "__init__.py").write_text("raise RuntimeError\n")
    assert imported_code(sys.executable, {"PYTHONPATH": str(code)}) == SourceCode()
    assert imported_code("/nowhere/python", {}) == SourceCode()


def test_the_code_is_that_of_a_package_and_its_subpackages(tmp_path: Path) -> None:
    for name in ("a.py", "sub/__init__.py", "sub/kernel.cu", "tests/test_a.py", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "self").symlink_to(tmp_path)
    before = sources_sha256(tmp_path)
    (tmp_path / "notes.md").write_text("")
    (tmp_path / "tests" / "test_a.py").write_text("")
    assert sources_sha256(tmp_path) == before
    (tmp_path / "sub" / "kernel.cu").write_text("")
    assert sources_sha256(tmp_path) != before
