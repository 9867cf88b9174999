"""The benches' own command lines: lists are read, a mistake or a missing card is a line and not a traceback."""

import argparse
import importlib
import sys

import pytest
import torch
from kernarc.decoder.bench.command_line import counts, draft_counts, exit_with, names_of, require_card
from kernarc.decoder.errors import DecoderError


def test_lists_are_read() -> None:
    assert counts("128,8192") == [128, 8192]
    assert draft_counts("0, 3,8") == [0, 3, 8]
    assert draft_counts("") == []
    assert names_of(("cuda", "triton"))("triton,cuda") == ["triton", "cuda"]


@pytest.mark.parametrize("text", ["", "8k", "128;8192", "0", "4,-1"])
def test_what_is_no_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="128,8192"):
        counts(text)


@pytest.mark.parametrize("text", ["9", "-1", "three"])
def test_what_is_no_draft_count_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="from 0 to 8"):
        draft_counts(text)


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'arn' is none of cuda, triton"):
        names_of(("cuda", "triton"))("cuda,arn")


@pytest.mark.parametrize("name", ["kernels", "layers", "prefill", "gdn_prefill", "model"])
def test_a_bench_without_a_card_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    module = importlib.import_module(f"kernarc.decoder.bench.{name}")
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(DecoderError, match=r"no CUDA card.*\n.*runs on a card alone"):
        module.main()


def test_an_expected_failure_is_a_line_and_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise DecoderError("what is wrong", "what to do")

    with pytest.raises(SystemExit, match="2"):
        exit_with(fails)
    assert capsys.readouterr().err == "error: what is wrong\n  what to do\n"
    with pytest.raises(SystemExit, match="1"):
        exit_with(lambda: 1)


def test_the_card_is_the_current_one(device: str) -> None:
    if device == "cuda":
        assert require_card() == torch.device("cuda", torch.cuda.current_device())
