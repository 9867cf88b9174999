"""Chat endpoints: the template's tokens count, so the text is cut until the whole is exactly as deep as asked for."""

from pathlib import Path

import pytest
from kernarc.harness.config.builds import resolve_build
from kernarc.harness.config.models import MeasurementConfig
from kernarc.harness.errors import ConfigError, VoidMeasurementError
from kernarc.harness.run.plan import RunPlan
from kernarc.harness.run.run import Run
from kernarc.harness.selftest.conformance.process import ConformanceServer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    words = {
        word: n for n, word in enumerate(["?", "def", "class", "return", "self", "import", "if", "for", "in", "x"])
    }
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def chat_run(server: ConformanceServer, case: str, tokenizer_json: Path, out: Path) -> Run:
    path = out.with_name(f"{case}.yaml")
    path.write_text(
        f"engine: endpoint\nurl: {server.url(case)}\nserved_model: {case}\napi: chat\ntokenizer: {tokenizer_json}\n"
    )
    config = MeasurementConfig(depths=(40, 100), requests_per_depth=2, max_tokens=64)
    return Run.create(RunPlan.of("bench", "test", config, [resolve_build(str(path))], 1), out)


def test_the_wrapped_prompt_is_exactly_as_deep(tokenizer_json: Path, tmp_path: Path) -> None:
    with ConformanceServer() as server:
        run = chat_run(server, "chat-template", tokenizer_json, tmp_path / "run")
        run.measure()
        assert {truth.prompt_tokens for truth in server.new_truths()} == {40, 100}
    streams = run.directory.streams()
    assert [stream.usage.prompt_tokens for stream in streams] == [stream.depth for stream in streams]
    assert "Python standard library text" in run.directory.manifest().prompt_source


def test_without_tokenize_the_depth_cannot_be_exact_and_nothing_is_measured(
    tokenizer_json: Path, tmp_path: Path
) -> None:
    with ConformanceServer() as server:
        run = chat_run(server, "chat-template-unmeasured", tokenizer_json, tmp_path / "run")
        with pytest.raises(VoidMeasurementError, match="no /tokenize"):
            run.measure()
    assert run.directory.streams() == []


def test_chat_needs_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text("engine: endpoint\nurl: http://127.0.0.1:9\napi: chat\n")
    with pytest.raises(ConfigError, match="needs a 'tokenizer'"):
        resolve_build(str(path))
