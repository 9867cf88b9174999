"""The benches' own command lines: lists are read, a mistake or a missing card is a line and not a traceback."""

import importlib
import re
import sys

import click
import pytest
import torch
from click.testing import CliRunner
from kernarc.decoder.bench.command_line import COUNTS, DRAFT_COUNTS, NamesOf, on_card, require_card
from kernarc.decoder.errors import DecoderError


def test_lists_are_read() -> None:
    assert COUNTS("128,8192") == [128, 8192]
    assert DRAFT_COUNTS("0, 3,8") == [0, 3, 8]
    assert DRAFT_COUNTS("") == []
    assert NamesOf(("cuda", "triton"))("triton,cuda") == ["triton", "cuda"]


@pytest.mark.parametrize("text", ["", "8k", "128;8192", "0", "4,-1"])
def test_what_is_no_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="128,8192"):
        COUNTS(text)


@pytest.mark.parametrize("text", ["9", "-1", "three"])
def test_what_is_no_draft_count_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="from 0 to 8"):
        DRAFT_COUNTS(text)


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(click.BadParameter, match="'arn' is none of cuda, triton"):
        NamesOf(("cuda", "triton"))("cuda,arn")


@pytest.mark.parametrize("name", ["kernels", "layers", "prefill", "gdn_prefill", "model"])
def test_a_bench_without_a_card_says_so(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    module = importlib.import_module(f"kernarc.decoder.bench.{name}")
    result = CliRunner().invoke(module.main, [])
    assert result.exit_code == 2
    assert re.search(r"^error: .*no CUDA card.*\n.*runs on a card alone", result.stderr)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("kernels", ["--rows", "four"], "'four' is no list of whole numbers above 0"),
        ("layers", ["--parts", "gdn,head"], "'head' is none of gdn, attention"),
        ("model", ["--drafts", "9"], "'9' is no list of draft counts from 0 to 8"),
    ],
)
def test_a_mistake_is_told_with_its_option(name: str, arguments: list[str], told: str) -> None:
    module = importlib.import_module(f"kernarc.decoder.bench.{name}")
    result = CliRunner().invoke(module.main, arguments)
    assert result.exit_code == 2
    assert f"'{arguments[0]}': {told}" in result.stderr


def test_an_expected_failure_is_a_line_and_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise DecoderError("what is wrong", "what to do")

    with pytest.raises(SystemExit, match="2"):
        on_card(fails)()
    assert capsys.readouterr().err == "error: what is wrong\n  what to do\n"
    with pytest.raises(SystemExit, match="1"):
        on_card(lambda: sys.exit(1))()


def test_the_card_is_the_current_one(device: str) -> None:
    if device == "cuda":
        assert require_card() == torch.device("cuda", torch.cuda.current_device())
