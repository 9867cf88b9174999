"""Is what a resumed run would measure still what it measured before? One row must not mix two codes or two machines."""

from collections.abc import Iterator, Sequence

from ..config.builds import Build
from ..environment import MUST_MATCH_ENVIRONMENT
from ..errors import ConfigError
from .records import BuildRecord, Environment, RunManifest

# Where a checkpoint or an interpreter lies is no part of what was measured; hashes and versions are.
NOT_COMPARED = {"name", "model", "command"}
ENVIRONMENT = (*MUST_MATCH_ENVIRONMENT, "python_version", "library_versions", "kernarc_version")
TOLD_BY_THE_CODE = {"engine_version", "library_versions", "git_commit", "git_dirty"}
HINT = "put that back as it was and resume, or measure again: one row must not mix the two"

Difference = tuple[str, object, object]  # key, then, now


def require_unchanged(manifest: RunManifest, builds: Sequence[BuildRecord], environment: Environment) -> None:
    """ConfigError for the first thing that differs between the run's records and what is there now."""
    for then, now in zip(manifest.builds, builds, strict=True):
        for key, old, new in _build_differences(then, now):
            raise ConfigError(f"run {manifest.run_id} cannot be resumed: {then.name}: {_change(key, old, new)}", HINT)
    for key in ENVIRONMENT:
        old, new = getattr(manifest.environment, key), getattr(environment, key)
        if old != new:
            raise ConfigError(
                f"run {manifest.run_id} cannot be resumed: {_change(f'environment.{key}', old, new)}", HINT
            )


def as_far_as_recorded(manifest: RunManifest, plan: Sequence[Build], now: Sequence[BuildRecord]) -> list[BuildRecord]:
    """The records of now, less what the run's own records, written by an earlier version, do not say of the builds."""
    return [_as_far_as_recorded(*each) for each in zip(manifest.builds, plan, now, strict=True)]


def not_verified(manifest: RunManifest) -> Iterator[str]:
    """In words, what the run's records do not hold, so that nobody can tell whether it changed."""
    for build in manifest.builds:
        if build.engine == "kernarc" and build.sources_sha256 is None:
            yield f"{build.name}: the run recorded no hash of its code, so whether it changed cannot be verified"
        if build.draft_vocab_size is not None and build.draft_vocab_sha256 is None:
            yield f"{build.name}: the run recorded no hash of its draft vocabulary, which cannot be verified"


def _as_far_as_recorded(then: BuildRecord, build: Build, now: BuildRecord) -> BuildRecord:
    unsaid: set[str] = set()
    if then.sources_sha256 is None:
        unsaid.add("sources_sha256")
        # These were the harness's own then, whatever the build ran.
        if build.git_commit is None and (build.pythonpath or build.config.python is not None):
            unsaid |= TOLD_BY_THE_CODE
    if then.draft_vocab_sha256 is None:
        unsaid.add("draft_vocab_sha256")
    return now.model_copy(update={key: getattr(then, key) for key in unsaid})


def _build_differences(then: BuildRecord, now: BuildRecord) -> Iterator[Difference]:
    for key in BuildRecord.model_fields:
        old, new = getattr(then, key), getattr(now, key)
        if key not in NOT_COMPARED and old != new:
            yield key, old, new
    old_words, new_words = _options(then), _options(now)
    if old_words != new_words:
        yield "command", " ".join(old_words), " ".join(new_words)


def _options(build: BuildRecord) -> list[str]:
    """The command line less the places of interpreter and checkpoint: `python` and `python3` may be one."""
    return [word.replace(build.model, "MODEL") for word in build.command[1:]]


def _change(key: str, old: object, new: object) -> str:
    """Of a mapping only what differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        old, new = ({name: side.get(name) for name in names} for side in (old, new))
    return f"{key} was {old!r} and is {new!r} now"
