"""A run is not resumed on other code, another machine or another draft vocabulary than it was begun on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kernarc.harness.config.builds import Build
from kernarc.harness.config.models import MeasurementConfig
from kernarc.harness.errors import ConfigError, EngineError
from kernarc.harness.run import run as runs
from kernarc.harness.run.plan import RunPlan
from kernarc.harness.run.progress import RunObserver
from kernarc.harness.run.records import Environment
from kernarc.harness.run.run import Run

MakeBuild = Callable[..., Build]


class Notes(RunObserver):
    """What a run tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def notify(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture
def build(fake_build: MakeBuild, tmp_path: Path) -> MakeBuild:
    """Builds whose engine is a copy of the stand-in decoder that a test may change."""
    code = tmp_path / "code"
    shutil.copytree(fake_build().pythonpath[0], code, ignore=shutil.ignore_patterns("__pycache__"))

    def make(*extra_args: str, **config: object) -> Build:
        return fake_build("a", *extra_args, **config).model_copy(update={"pythonpath": (str(code),)})

    return make


def create(build: Build, out: Path) -> Run:
    config = MeasurementConfig(depths=(20,), requests_per_depth=3, max_tokens=9, seed=3)
    return Run.create(RunPlan.of("bench", "test", config, [build], 2), out)


def test_an_engine_dies_and_its_code_changes_before_resuming(build: MakeBuild, tmp_path: Path) -> None:
    run = create(build("--die-at-request", "3", "--die-once", str(tmp_path / "died")), tmp_path / "run")
    with pytest.raises(EngineError):
        run.measure()
    source = tmp_path / "code" / "kernarc" / "cli.py"
    content = source.read_text()
    source.write_text(content.replace('"--step-ms", type=float, default=1.0', '"--step-ms", type=float, default=5.0'))
    before = run.directory.manifest_path.read_bytes()
    with pytest.raises(ConfigError, match=r"a: sources_sha256 was '[0-9a-f]{64}' and is '[0-9a-f]{64}' now") as refusal:
        Run.resume(tmp_path / "run")
    assert refusal.value.exit_code == 2
    assert "put that back as it was and resume, or measure again" in refusal.value.hint
    assert run.directory.manifest_path.read_bytes() == before
    source.write_text(content)
    notes = Notes()
    assert Run.resume(tmp_path / "run", notes).measure().finished_utc is not None
    assert notes.lines == []
    source.write_text("changed")
    assert Run.resume(tmp_path / "run").is_finished, "nothing is left to be measured on the other code"


def test_the_draft_vocabulary_changes(build: MakeBuild, tmp_path: Path) -> None:
    path = tmp_path / "drafts.json"
    path.write_text('{"ids": [1, 2]}')
    create(build(draft_vocab=str(path)), tmp_path / "run")
    path.write_text('{"ids": [1, 3]}')
    with pytest.raises(ConfigError, match="a: draft_vocab_sha256 was"):
        Run.resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("cpu_model", "Another CPU", r"environment\.cpu_model was '.+' and is 'Another CPU' now"),
        ("library_versions", {"torch": "0.1"}, r"environment\.library_versions was .* is .*'torch': '0\.1'"),
        ("python_version", "3.0", r"environment\.python_version was .* is '3\.0' now"),
    ],
)
def test_the_machine_or_its_software_changes(
    key: str, value: object, told: str, build: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: Environment = create(build(), tmp_path / "run").directory.manifest().environment
    monkeypatch.setattr(runs, "read_environment", lambda _: environment.model_copy(update={key: value}))
    with pytest.raises(ConfigError, match=told):
        Run.resume(tmp_path / "run")


def test_where_checkpoint_and_interpreter_lie_may_change(build: MakeBuild, tmp_path: Path) -> None:
    run = create(build(), tmp_path / "run")
    (record,) = run.directory.manifest().builds
    moved = record.model_copy(update={"command": ("/elsewhere/python3", *record.command[1:])})
    run.directory.update_manifest(builds=(moved,))
    (tmp_path / "model").rename(tmp_path / "moved")
    plan = tmp_path / "run" / "plan.json"
    plan.write_text(plan.read_text().replace(str(tmp_path / "model"), str(tmp_path / "moved")))
    assert not Run.resume(tmp_path / "run").is_finished


def test_a_run_of_before_there_were_hashes_is_resumed_and_says_so(build: MakeBuild, tmp_path: Path) -> None:
    """It also holds the harness's own commit and version for code that was another."""
    path = tmp_path / "drafts.json"
    path.write_text('{"ids": [1, 2]}')
    create(build(draft_vocab=str(path)), tmp_path / "run")
    manifest = tmp_path / "run" / "manifest.json"
    content = json.loads(manifest.read_text())
    (record,) = content["builds"]
    del record["sources_sha256"], record["draft_vocab_sha256"]
    record.update(git_commit="0" * 40, git_dirty=True, engine_version="0.1.0")
    manifest.write_text(json.dumps(content))
    notes = Notes()
    Run.resume(tmp_path / "run", notes)
    assert [line.partition(":")[0] for line in notes.lines] == ["a", "a"]
    assert "recorded no hash of its code, so whether it changed cannot be verified" in notes.lines[0]
    assert "draft vocabulary" in notes.lines[1]
    record["num_speculative_tokens"] = 1
    manifest.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="a: num_speculative_tokens was 1 and is 3 now"):
        Run.resume(tmp_path / "run")
