"""What a build can be called, and what it becomes."""

import re
from pathlib import Path

import pytest
from kernarc.harness.config.builds import resolve_build, resolve_builds
from kernarc.harness.config.models import ModelSource
from kernarc.harness.engines.kernarc import draft_vocab_size
from kernarc.harness.engines.registry import engine_of
from kernarc.harness.errors import ConfigError


def test_a_name_takes_the_bench_s_model() -> None:
    build = resolve_build("kernarc", ModelSource(path="/models/x"))
    assert (build.name, build.engine, build.num_speculative_tokens) == ("kernarc", "kernarc", 3)
    assert build.model_source == ModelSource(path="/models/x")


def test_without_any_model_it_is_the_tiny_one() -> None:
    assert resolve_build("vllm").model_source == ModelSource(synth="tiny")


def test_a_file_s_own_model_wins_and_its_paths_start_at_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("engine: kernarc\nmodel: {path: ../m}\npythonpath: [code]\n")
    build = resolve_build(str(path), ModelSource(synth="tiny"))
    assert build.name == "mine"
    assert build.model_source == ModelSource(path=str(tmp_path.parent / "m"))
    assert build.pythonpath == (str(tmp_path / "code"),)


def test_a_draft_vocabulary_is_passed_on_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("engine: kernarc\nnum_speculative_tokens: 3\ndraft_vocab: v.json\n")
    (tmp_path / "v.json").write_text('{"ids": [4, 5, 9]}')
    build = resolve_build(str(path), ModelSource(path=str(tmp_path)))
    command = engine_of(build, 100).command(tmp_path, 8000)
    assert command[command.index("--draft-vocab") + 1] == str(tmp_path / "v.json")
    assert draft_vocab_size(build, tmp_path) == 3
    own = resolve_build("kernarc-draft-vocab")
    (tmp_path / "draft_vocab.json").write_text('{"ids": [4, 5]}')
    assert draft_vocab_size(own, tmp_path) == 2
    assert str(tmp_path / "draft_vocab.json") in engine_of(own, 100).command(tmp_path, 8000)
    assert draft_vocab_size(resolve_build("kernarc"), tmp_path) is None
    with pytest.raises(ConfigError, match="is no draft vocabulary"):
        draft_vocab_size(own, tmp_path / "elsewhere")
    path.write_text("engine: vllm\ndraft_vocab: v.json\n")
    with pytest.raises(ConfigError, match="'draft_vocab' belongs to engine 'kernarc'"):
        resolve_build(str(path))


@pytest.mark.parametrize(("key", "option"), [("draft_window", "--draft-window"), ("draft_context", "--draft-context")])
def test_what_drafts_read_of_a_prompt_is_passed_on(tmp_path: Path, key: str, option: str) -> None:
    path = tmp_path / "mine.yaml"
    for value in ("64", "0", "all"):
        path.write_text(f"engine: kernarc\n{key}: {value}\n")
        command = engine_of(resolve_build(str(path)), 100).command(tmp_path, 8000)
        assert command[command.index(option) + 1] == value
    assert option not in engine_of(resolve_build("kernarc"), 100).command(tmp_path, 8000)
    for content, said in (
        (f"engine: vllm\n{key}: 64\n", f"'{key}' belongs to engine 'kernarc'"),
        (f"engine: kernarc\n{key}: -1\n", f"'{key}': expected all or at least 0 prompt positions, got -1$"),
        (f"engine: kernarc\n{key}: some\n", f"'{key}': expected all or at least 0 prompt positions, got 'some'$"),
        (f"engine: kernarc\n{key}: true\n", f"'{key}': expected all or at least 0 prompt positions, got True$"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError) as refusal:
            resolve_build(str(path))
        assert re.search(said, refusal.value.message)


@pytest.mark.parametrize(
    ("spec", "name", "url", "model"),
    [
        ("endpoint:http://127.0.0.1:8000", "127.0.0.1:8000", "http://127.0.0.1:8000", None),
        ("endpoint:http://host:8000/x/v1/#org/m", "host:8000/x", "http://host:8000/x/v1", "org/m"),
        ("endpoint:https://api.example", "api.example", "https://api.example", None),
    ],
)
def test_endpoints(spec: str, name: str, url: str, model: str | None) -> None:
    build = resolve_build(spec)
    assert (build.name, build.config.url, build.config.served_model) == (name, url, model)
    assert build.config.vocab_size == 1000


@pytest.mark.parametrize("spec", ["endpoint:", "endpoint:127.0.0.1:8000", "endpoint:ftp://x", "endpoint:http://x:0"])
def test_endpoints_without_a_usable_url(spec: str) -> None:
    with pytest.raises(ConfigError, match="names no server"):
        resolve_build(spec)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'kernarc'"):
        resolve_build("kernac")


def test_one_build_twice_gets_two_names() -> None:
    assert [build.name for build in resolve_builds(["kernarc", "kernarc", "kernarc"])] == [
        "kernarc",
        "kernarc-2",
        "kernarc-3",
    ]


def test_variables_in_paths_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "host.yaml"
    path.write_text("engine: vllm\npython: python3\npythonpath: [$SOME_SITE]\nmodel: {path: $SOME_SITE/model}\n")
    monkeypatch.delenv("SOME_SITE", raising=False)
    with pytest.raises(ConfigError, match=r"host: .*needs the environment variable SOME_SITE"):
        resolve_build(str(path))
    monkeypatch.setenv("SOME_SITE", "/site")
    build = resolve_build(str(path))
    assert build.pythonpath == ("/site",)
    assert build.model_source == ModelSource(path="/site/model")
    assert build.config.python == "python3"


def test_an_interpreter_of_a_venv_keeps_its_link(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to("/usr/bin/env")
    path = tmp_path / "mine.yaml"
    path.write_text("engine: kernarc\npython: venv/python\n")
    assert resolve_build(str(path)).config.python == str(tmp_path / "venv" / "python")
