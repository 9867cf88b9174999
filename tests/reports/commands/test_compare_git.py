"""`compare git:REF git:REF`: each commit runs from its own code; a broken and a slow one are both stopped."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernarc.cli import main
from kernarc.harness.caches import cache_folder
from kernarc.harness.config.builds import resolve_build
from kernarc.harness.config.git_builds import KEPT_WORKTREES, hold_again
from kernarc.harness.errors import ConfigError

from ...fakes.cycle_checkpoint import write_cycle_checkpoint

FAKE_DECODER = Path(__file__).parents[2] / "fakes" / "fake_decoder" / "kernarc"
SMALL = ["--depths", "32", "--requests", "4", "--max-tokens", "33", "--looks", "3", "--json"]


@dataclass(frozen=True)
class Repository:
    """A small git repository whose decoder is the stand-in, at 10 ms a step."""

    path: Path

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(self.path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, message: str, old: str = "", new: str = "") -> str:
        """Replaces text in the decoder and commits; returns the hash."""
        if old:
            source = self.path / "cli.py"
            assert old in source.read_text()
            source.write_text(source.read_text().replace(old, new))
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    path = tmp_path / "repository"
    shutil.copytree(FAKE_DECODER, path)
    (path / "decoder").mkdir()
    (path / "decoder" / "__init__.py").touch()
    made = Repository(path)
    made.git("init", "--quiet", "--initial-branch", "main")
    made.commit("base", '"--step-ms", type=float, default=1.0', '"--step-ms", type=float, default=10.0')
    monkeypatch.chdir(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


@pytest.fixture
def gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    model = write_cycle_checkpoint(tmp_path / "model")

    def run(baseline: str, candidate: str, out: str) -> tuple[int, str]:
        arguments = ["compare", baseline, candidate, *SMALL, "--model", str(model), "--out", str(tmp_path / out)]
        monkeypatch.setattr(sys, "argv", ["kernarc-gate", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        verdict = json.loads((tmp_path / out / "verdict.json").read_text())
        capsys.readouterr()
        return int(stopped.value.code or 0), verdict["sentence"]

    return run


def test_a_slow_and_a_wrong_commit_are_stopped_and_the_report_says_which(
    repository: Repository, gate: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    slow = repository.commit("slow", "default=10.0", "default=40.0")
    code, sentence = gate("git:main~1", "git:main", "slow")
    assert code == 1
    assert f"FAIL: main@{slow[:9]} is" in sentence
    assert "the effect is from the step" in sentence
    repository.git("checkout", "--quiet", "-b", "wrong", "main~1")
    wrong = repository.commit("wrong", "7 * last + 3 +", "7 * last + 4 +")
    code, sentence = gate("git:main~1", "git:wrong", "wrong")
    assert code == 1
    assert f"FAIL: the output of wrong@{wrong[:9]} is wrong" in sentence
    builds = json.loads((tmp_path / "wrong" / "manifest.json").read_text())["builds"]
    assert [build["git_commit"] for build in builds][1] == wrong
    assert repository.git("status", "--porcelain") == ""  # nothing is left in the repository itself


def test_worktree_is_cached_by_commit_and_mended_where_somebody_wrote_into_it(repository: Repository) -> None:
    first = Path(resolve_build("git:HEAD").pythonpath[0])
    source = first / "kernarc" / "cli.py"
    marker = source.stat().st_mtime_ns
    assert Path(resolve_build("git:main").pythonpath[0]) == first
    assert source.stat().st_mtime_ns == marker
    content = source.read_text()
    source.write_text(content + "# tampered\n")
    resolve_build("git:HEAD")
    assert source.read_text() == content


def test_a_resumed_run_finds_its_commit_as_a_new_one_does(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mended where somebody wrote into it, made where it is gone, refused where it cannot be made."""
    build = resolve_build("git:HEAD")
    source = Path(build.pythonpath[0]) / "kernarc" / "cli.py"
    content = source.read_text()
    source.write_text(content + "# tampered\n")
    hold_again(build)
    assert source.read_text() == content
    shutil.rmtree(Path(build.pythonpath[0]).parent)
    hold_again(build)
    assert source.read_text() == content
    source.unlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is gone or was changed"):
        hold_again(build)


def test_a_resumed_run_holds_its_worktrees(repository: Repository) -> None:
    """Another process makes as many as are kept, and more; the one that was found again stays."""
    script = "import sys; from kernarc.harness.config.builds import resolve_build; resolve_build(sys.argv[1])"

    def make_elsewhere(commit: str) -> None:
        subprocess.run([sys.executable, "-c", script, f"git:{commit}"], check=True)

    first = repository.git("rev-parse", "HEAD")
    make_elsewhere(first)
    (tree,) = (folder for folder in cache_folder("worktrees").glob("*/*/tree"))
    build = resolve_build("kernarc").model_copy(
        update={"pythonpath": (str(tree.with_name("path")),), "git_commit": first}
    )
    hold_again(build)
    for number in range(KEPT_WORKTREES + 1):
        (repository.path / "number.txt").write_text(str(number))
        make_elsewhere(repository.commit(f"number {number}"))
    assert tree.is_dir()


def test_working_tree_is_copied_as_it_is_now(repository: Repository) -> None:
    (repository.path / ".gitignore").write_text("*.log\n")
    (repository.path / "new.py").write_text("x = 1\n")
    (repository.path / "noise.log").write_text("noise\n")
    (repository.path / "cli.py").write_text("changed = True\n")
    build = resolve_build("git:.")
    tree = Path(build.pythonpath[0]) / "kernarc"
    assert (tree / "cli.py").read_text() == "changed = True\n"
    assert (tree / "new.py").is_file()
    assert not (tree / "noise.log").exists()
    assert (build.git_dirty, build.git_commit) == (True, repository.git("rev-parse", "HEAD"))
    (repository.path / "cli.py").write_text("changed = again\n")
    assert (tree / "cli.py").read_text() == "changed = True\n"
    assert resolve_build("git:.").pythonpath != build.pythonpath


def test_old_worktrees_go_but_none_in_use(repository: Repository, tmp_path: Path) -> None:
    script = (
        "import sys; from kernarc.harness.config.builds import resolve_build; "
        "print(resolve_build(sys.argv[1]).pythonpath[0])"
    )
    kept = []
    for number in range(KEPT_WORKTREES + 3):
        (repository.path / "number.txt").write_text(str(number))
        commit = repository.commit(f"number {number}")
        if number == 0:
            kept.append(Path(resolve_build(f"git:{commit}").pythonpath[0]))  # held by this process
        else:
            command = [sys.executable, "-c", script, f"git:{commit}"]
            found = subprocess.run(command, check=True, capture_output=True, text=True)
            kept.append(Path(found.stdout.strip()))
    assert kept[0].is_dir()
    assert not kept[1].exists()
    assert kept[-1].is_dir()
    assert len(repository.git("worktree", "list").splitlines()) <= 1 + KEPT_WORKTREES + 1


def test_what_is_no_commit_of_a_decoder_is_refused(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no such commit"):
        resolve_build("git:nowhere")
    with pytest.raises(ConfigError, match="no such commit"):
        resolve_build("git:--help")
    repository.git("rm", "--quiet", "-r", "decoder")
    repository.commit("no decoder")
    with pytest.raises(ConfigError, match="has no decoder"):
        resolve_build("git:HEAD")
    outside = tmp_path / "outside"
    outside.mkdir()
    monkeypatch.chdir(outside)
    with pytest.raises(ConfigError, match="not inside a git repository"):
        resolve_build("git:HEAD")
