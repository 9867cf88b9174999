"""`git:REF`: the decoder at a commit, in a worktree of its own; `git:.`: the working tree as it is now, copied.

Worktrees are kept in the cache by commit, a few a repository; one that a run is using is never removed. Every build
imports `kernarc` through a link of its own, so two commits run side by side, each from its own code.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from ..caches import cache_folder
from ..errors import ConfigError
from .builds import Build, build_from_config
from .models import BuildConfig, ModelSource
from .yaml_files import load

KEPT_WORKTREES = 6  # of one repository; the least recently used go first
SERVED_BY = "kernarc"  # the build whose settings (drafts, device) a commit is served with
NEEDED = ("cli.py", "decoder")
SNAPSHOT = "snapshot-"

_held: list[TextIO] = []  # locks that say "in use" until this process ends


def resolve_git_build(ref: str, default_model: ModelSource | None = None) -> Build:
    """The build of a commit (branch, tag, hash, HEAD~2), or of the working tree where ref is ".".

    ConfigError outside a repository of kernarc-gate, or where the commit does not exist.
    """
    repository = _repository(Path.cwd())
    commit = _commit(repository, "HEAD" if ref == "." else ref)
    folder = _folder_of(repository)
    if ref == ".":
        tree, is_dirty = _snapshot(repository, folder)
        name = f"working-tree@{commit[:9]}{'+' if is_dirty else ''}"
    else:
        tree, is_dirty = _worktree(repository, folder, commit), False
        name = f"{ref}@{commit[:9]}"
    missing = [needed for needed in NEEDED if not (tree / needed).exists()]
    if missing:
        raise ConfigError(f"git:{ref} has no {missing[0]}: it is not kernarc-gate's decoder", "name another commit")
    _remove_old(repository, folder, keep=tree.parent)
    build = build_from_config(name, load(SERVED_BY, BuildConfig), default_model)
    return build.model_copy(update={"pythonpath": (str(_link(tree)),), "git_commit": commit, "git_dirty": is_dirty})


def hold_again(build: Build) -> None:
    """For a run that is resumed: holds the tree of a `git:` build as a new run does, remade where somebody changed it.

    ConfigError where it is gone or changed and cannot be made here.
    """
    folder = Path(build.pythonpath[0]).parent
    tree = folder / "tree"
    if folder.is_dir():
        _hold(folder)
    is_commit = not folder.name.startswith(SNAPSHOT)
    if is_commit and not _is_sound(tree, str(build.git_commit)):
        try:
            repository = _repository(Path.cwd())
            is_here = _folder_of(repository) == folder.parent
        except ConfigError:
            is_here = False
        if is_here:
            _worktree(repository, folder.parent, str(build.git_commit))
    if not tree.is_dir() or (is_commit and not _is_sound(tree, str(build.git_commit))):
        raise ConfigError(
            f"{build.name}: its code at {tree} is gone or was changed",
            "resume in the checkout that the run was started in, or measure again",
        )
    _link(tree)


def _repository(start: Path) -> Path:
    try:
        return Path(_git(start, "rev-parse", "--show-toplevel"))
    except ConfigError as error:
        raise ConfigError(
            f"{start} is not inside a git repository, so git:REF names nothing", "run it in a checkout of kernarc-gate"
        ) from error


def _commit(repository: Path, ref: str) -> str:
    try:
        return _git(repository, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}")
    except ConfigError as error:
        raise ConfigError(
            f"git:{ref}: there is no such commit in {repository}",
            "a shallow clone lacks most: fetch it first (actions/checkout: fetch-depth: 0)",
        ) from error


def _folder_of(repository: Path) -> Path:
    """One folder a repository, whatever worktree of it we are in."""
    common = Path(_git(repository, "rev-parse", "--path-format=absolute", "--git-common-dir")).resolve()
    return cache_folder("worktrees", hashlib.sha256(str(common).encode()).hexdigest()[:12])


def _worktree(repository: Path, folder: Path, commit: str) -> Path:
    """A checkout of the commit, made or found sound."""
    tree = folder / commit / "tree"
    with _exclusively(tree.parent):
        if not _is_sound(tree, commit):
            _remove(repository, tree)
            _git(repository, "worktree", "prune")
            _git(repository, "worktree", "add", "--force", "--detach", str(tree), commit)
    _hold(tree.parent)
    return tree


def _is_sound(tree: Path, commit: str) -> bool:
    """Still that commit, and nobody wrote into it."""
    if not (tree / ".git").exists():
        return False
    try:
        return _git(tree, "rev-parse", "HEAD") == commit and not _git(
            tree, "status", "--porcelain", "--untracked-files=no"
        )
    except ConfigError:
        return False


def _snapshot(repository: Path, folder: Path) -> tuple[Path, bool]:
    """A copy of the working tree's files (ignored ones left out), and whether they differ from HEAD.

    A copy, because a comparison starts its engines many times and must not see edits made meanwhile.
    """
    names = _git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    files = sorted({name for name in names if name and (repository / name).is_file()})
    digest = hashlib.sha256()
    for name in files:
        digest.update(f"{name}\0".encode() + hashlib.sha256((repository / name).read_bytes()).digest())
    tree = folder / f"{SNAPSHOT}{digest.hexdigest()[:16]}" / "tree"
    with _exclusively(tree.parent):
        if not tree.exists():
            unfinished = tree.with_name("unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            for name in files:
                target = unfinished / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(repository / name, target)
            unfinished.rename(tree)
    _hold(tree.parent)
    return tree, bool(_git(repository, "status", "--porcelain"))


def _link(tree: Path) -> Path:
    """A folder for PYTHONPATH in which `kernarc` is this tree."""
    folder = tree.parent / "path"
    folder.mkdir(exist_ok=True)
    link = folder / "kernarc"
    if not link.is_symlink() or link.resolve() != tree.resolve():
        fresh = folder / f"kernarc.{os.getpid()}"
        fresh.symlink_to(tree, target_is_directory=True)
        fresh.replace(link)
    return folder


def _remove_old(repository: Path, folder: Path, keep: Path) -> None:
    """Removes the least recently used trees beyond the limit, but none that a process holds."""
    entries = [entry for entry in folder.iterdir() if entry.is_dir() and entry != keep]
    entries.sort(key=lambda entry: (entry / "in-use.lock").stat().st_mtime if (entry / "in-use.lock").exists() else 0.0)
    for entry in entries[: max(0, len(entries) + 1 - KEPT_WORKTREES)]:
        with (entry / "in-use.lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            _remove(repository, entry / "tree")
            shutil.rmtree(entry, ignore_errors=True)
    _git(repository, "worktree", "prune")


def _remove(repository: Path, tree: Path) -> None:
    if (tree / ".git").is_file():
        with suppress(ConfigError):  # a broken one is not known to git any more
            _git(repository, "worktree", "remove", "--force", str(tree))
    shutil.rmtree(tree, ignore_errors=True)


@contextmanager
def _exclusively(folder: Path) -> Iterator[None]:
    """Makes one tree at a time: a second process waits, then finds it made."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "making.lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _hold(folder: Path) -> None:
    """Marks a tree as used now, and in use until this process ends."""
    path = folder / "in-use.lock"
    file = path.open("a+")
    os.utime(path)
    fcntl.flock(file, fcntl.LOCK_SH)
    _held.append(file)


def _git(folder: Path, *arguments: str) -> str:
    """Standard output of a git command. ConfigError with git's own words where it fails."""
    # A hook or CI step may point git elsewhere by GIT_DIR and the like.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"cannot run git: {error}", "git: builds need git on PATH") from error
    if result.returncode != 0:
        raise ConfigError(f"git {' '.join(arguments)} failed in {folder}: {result.stderr.strip()}")
    return result.stdout.strip()
