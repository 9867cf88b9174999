"""A checkpoint is what its files say; a structured one is made once, and never half."""

import os
import subprocess
from pathlib import Path

import pytest
from kernarc.harness.config import checkpoints
from kernarc.harness.config.checkpoints import Checkpoint, ensure_checkpoint, shipped_models, synthetic_folder
from kernarc.harness.config.models import ModelSource
from kernarc.harness.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"text_config": {"vocab_size": 500, "eos_token_id": 7}, "eos_token_id": [8]}')
    return path


def test_vocabulary_and_ends_of_text(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert (checkpoint.vocab_size, checkpoint.eos_token_ids, checkpoint.tokenizer_json) == (500, (7, 8), None)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    (folder / "tokenizer.json").write_text("{}")
    assert checkpoint.eos_token_ids == (7, 8, 9)
    assert checkpoint.tokenizer_json == folder / "tokenizer.json"


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_config_that_says_nothing_is_named(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        _ = Checkpoint(folder).vocab_size


def test_the_hash_follows_names_sizes_and_content(folder: Path) -> None:
    seen = {Checkpoint(folder).sha256()}
    (folder / "a.safetensors").write_bytes(b"\0" * 100)
    seen.add(Checkpoint(folder).sha256())
    (folder / "a.safetensors").write_bytes(b"\0" * 99 + b"\1")
    seen.add(Checkpoint(folder).sha256())
    (folder / "a.safetensors").rename(folder / "b.safetensors")
    seen.add(Checkpoint(folder).sha256())
    assert len(seen) == 4


def test_large_files_are_sampled_at_both_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "WHOLE_FILE_BYTES", 100)
    monkeypatch.setattr(checkpoints, "SAMPLE_BYTES", 10)
    content = bytearray(1000)
    hashes = set()
    for changed in (None, 0, 999):
        if changed is not None:
            content[changed] += 1
        (folder / "a.safetensors").write_bytes(content)
        hashes.add(Checkpoint(folder).sha256())
    assert len(hashes) == 3


def test_a_structured_checkpoint_is_made_once_and_replaces_what_a_killed_process_left() -> None:
    path = synthetic_folder(ModelSource(synth="tiny"))
    with subprocess.Popen(["true"]) as ended:
        pass
    abandoned, alive = (path.with_name(f"{path.name}.making-{pid}") for pid in (ended.pid, os.getppid()))
    for folder in (abandoned, alive):
        folder.mkdir(parents=True)
    told: list[str] = []
    first = ensure_checkpoint(ModelSource(synth="tiny"), told.append)
    assert first.vocab_size > 100
    assert first.structured_acceptance == ModelSource(synth="tiny").acceptance
    assert ensure_checkpoint(ModelSource(synth="tiny"), told.append) == first
    assert sum("(once)" in line for line in told) == 1
    assert synthetic_folder(ModelSource(synth="tiny", acceptance=0.5)) != first.path
    assert not abandoned.exists()
    assert alive.exists(), "it may still be written to"


def test_a_shipped_checkpoint_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "python-7m" in shipped_models()
    shipped = ensure_checkpoint(ModelSource(path="python-7m"), lambda _: None)
    assert shipped.tokenizer_json is not None
    assert shipped.structured_acceptance is None
    with pytest.raises(ConfigError, match="is not a checkpoint directory") as error:
        ensure_checkpoint(ModelSource(path="python-7"), lambda _: None)
    assert "python-7m" in error.value.hint
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python-7m").mkdir()
    (tmp_path / "python-7m" / "config.json").write_text("{}")
    assert ensure_checkpoint(ModelSource(path="python-7m"), lambda _: None).path == tmp_path / "python-7m"


def test_a_shape_that_cannot_be_made_is_said_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="`model synth` failed") as error:
        ensure_checkpoint(ModelSource(synth="huge"), lambda _: None)
    assert "huge" in error.value.message
    with pytest.raises(ConfigError, match="cannot read the shape"):
        ensure_checkpoint(ModelSource(synth="./nothing.json"), lambda _: None)
