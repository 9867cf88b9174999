"""Every refusal names the file, the line, the key, what was expected and the nearest known key."""

from pathlib import Path

import pytest
from kernarc.harness.config.models import BenchConfig, BuildConfig
from kernarc.harness.config.yaml_files import load, names, override, parse, to_yaml
from kernarc.harness.errors import ConfigError


def refusal(text: str, model: type[BenchConfig] | type[BuildConfig] = BenchConfig) -> str:
    with pytest.raises(ConfigError) as error:
        parse(text, model, "bench.yaml")
    return error.value.message


BENCH = "builds: [kernarc]\ndepths: [128, 1024]\n"


@pytest.mark.parametrize("name", names("benches"))
def test_shipped_benches_are_valid(name: str) -> None:
    assert load(name, BenchConfig).depths


@pytest.mark.parametrize("name", names("builds"))
def test_shipped_builds_are_valid(name: str) -> None:
    assert load(name, BuildConfig).engine in ("kernarc", "vllm")


def test_the_default_bench_is_the_issue_s() -> None:
    config = load("default", BenchConfig)
    assert config.depths == (128, 1024, 4096)
    assert set(config.builds) == {"kernarc", "vllm"}
    assert set(config.builds_without_vllm) == {"kernarc", "kernarc-no-drafts"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BENCH + "request_per_depth: 3\n", ["line 3", "'request_per_depth'", "did you mean 'requests_per_depth'?"]),
        (BENCH + "limits:\n  stall_ms: 5\n", ["line 4", "'limits.stall_ms'", "did you mean 'stall_s'?"]),
        (BENCH + "limits:\n  stall_s: 30s\n", ["line 4", "'limits.stall_s'", "number", "'30s'", "write 30"]),
        (BENCH + "limits:\n  stall_s: 500ms\n", ["line 4", "write 0.5"]),
        (BENCH + "limits: {stall_s: -1}\n", ["line 3", "'limits.stall_s'", "greater than 0", "-1"]),
        (BENCH + "limits: {stall_s: .nan}\n", ["line 3", "'limits.stall_s'", "finite"]),
        (BENCH + "requests_per_depth: 2.5\n", ["line 3", "'requests_per_depth'", "integer", "2.5"]),
        (BENCH + "requests_per_depth: '4'\n", ["line 3", "'requests_per_depth'", "integer", "'4'"]),
        (BENCH + "requests_per_depth: true\n", ["line 3", "'requests_per_depth'", "integer"]),
        (BENCH + "residency: sometimes\n", ["line 3", "'residency'", "'both' or 'alternate'", "'sometimes'"]),
        (BENCH + "depths: [256]\n", ["line 3", "'depths' is given twice", "line 2"]),
        ("builds: [a]\ndepths: [128, 8K]\n", ["line 2", "'depths.1'", "integer", "'8K'", "write 8192"]),
        ("builds: [a]\ndepths:\n  - 128\n  - 4\n", ["line 4", "'depths.1'", "17"]),
        ("builds: [a]\ndepths: [1024, 128]\n", ["must rise"]),
        ("builds: [a]\n", ["'depths' is required"]),
        ("builds: []\ndepths: [128]\n", ["line 1", "'builds'", "at least 1"]),
        ("builds: [a\n", ["line 2", "not valid YAML"]),
        ("- a\n", ["expected keys and values"]),
        ("", ["'builds' is required", "'depths' is required"]),
        (BENCH + "model: {}\n", ["line 3", "'model'", "either 'path'"]),
        (BENCH + "model: {synth: tiny, acceptance: 87%}\n", ["line 3", "'model.acceptance'", "write 0.87"]),
        (BENCH + "model: {synth: tiny, acceptance: 87}\n", ["line 3", "'model.acceptance'", "less than or equal to 1"]),
        (BENCH + "1: {synth: tiny}\n", ["line 3", "unknown key '1'"]),
    ],
)
def test_refusals(text: str, expected: list[str]) -> None:
    message = refusal(text)
    assert message.startswith("bench.yaml, line ")
    for part in expected:
        assert part in message


def test_all_problems_are_told_at_once() -> None:
    message = refusal("builds: 3\ndepths: x\nsede: 4\n")
    assert [line.split(":")[0] for line in message.splitlines()] == [f"bench.yaml, line {n}" for n in (1, 2, 3)]


def test_an_endpoint_needs_a_url_and_is_not_started() -> None:
    assert "'url' belongs to engine 'endpoint'" in refusal("engine: endpoint\n", BuildConfig)
    assert "'url' belongs to engine 'endpoint'" in refusal("engine: vllm\nurl: http://a\n", BuildConfig)
    message = refusal("engine: endpoint\nurl: http://a\nextra_args: ['--x']\n", BuildConfig)
    assert "not started by us" in message


def test_names_and_files_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"named 'defualt' in configs/benches; did you mean 'default'\?"):
        load("defualt", BenchConfig)
    with pytest.raises(ConfigError, match=r"there is no file nowhere\.yaml"):
        load("nowhere.yaml", BenchConfig)


def test_a_path_works_and_dates_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("engine: kernarc\ndescription: 2026-11-30\n")
    assert load(path, BuildConfig).description == "2026-11-30"


def test_flags_are_checked_like_keys() -> None:
    config = parse(BENCH, BenchConfig, "bench.yaml")
    assert override(config, {"depths": [64], "max_tokens": None}).depths == (64,)
    assert override(config, {"max_tokens": None}) is config
    with pytest.raises(ConfigError, match=r"--max-tokens: 'max_tokens': .*greater than or equal to 2, got 0"):
        override(config, {"max_tokens": 0})


def test_the_effective_values_read_back() -> None:
    config = parse(BENCH + "limits: {stall_s: 5}\n", BenchConfig, "bench.yaml")
    assert parse(to_yaml(config), BenchConfig, "shown") == config
