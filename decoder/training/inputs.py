"""What a training command is given: its shared options, and the text on the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import Corpus, describe, held_out_list, installed_documents, running_version, split
from .streams import LIBRARY_SHARE, Streams, encode_corpus, read_corpus
from .tokenizer import token_bytes
from .trainer import Plan


@dataclass(frozen=True)
class Inputs:
    """The options that training and unlooping share, as they were given."""

    out: Path
    smoke: bool
    corpus: Path | None
    tokens_per_step: int
    peak_learning_rate: float
    seed: int
    no_compile: bool


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of Inputs."""
    a_path = click.Path(path_type=Path)
    for option in reversed(
        (
            click.option("--out", type=a_path, required=True, help="the model folder to write"),
            click.option("--smoke", is_flag=True, help="few tokens a step, on the CPU"),
            click.option(
                "--corpus", type=a_path, help="text gathered by …training.prepare (default: what is installed)"
            ),
            click.option("--tokens-per-step", default=131072),
            click.option("--peak-learning-rate", default=7e-3),
            click.option("--seed", default=0),
            click.option("--no-compile", is_flag=True, help="do not use torch.compile"),
        )
    ):
        command = option(command)
    return command


def device_of(inputs: Inputs) -> str:
    """cuda where there is one, but for a smoke run."""
    return "cuda" if torch.cuda.is_available() and not inputs.smoke else "cpu"


def workers_of(inputs: Inputs) -> int:
    """Processes that read and encode text."""
    return 1 if inputs.smoke else len(os.sched_getaffinity(0))


def plan_of(inputs: Inputs, device: str) -> Plan:
    """The plan that the options ask for."""
    peak, seed = inputs.peak_learning_rate, inputs.seed
    if inputs.smoke:
        return Plan(1024, 256, 512, peak, seed, 1e9, False)
    return Plan(inputs.tokens_per_step, 2048, 8192, peak, seed, 30.0, device == "cuda" and not inputs.no_compile)


@dataclass(frozen=True)
class Text:
    """Encoded text, the held-out texts themselves, and what the card and heldout.json say about them."""

    streams: Streams
    sizes: Tensor  # [vocab] bytes a token stands for
    held_out_texts: list[str]
    held_out: dict[str, object]
    described: dict[str, Any]


def gather(inputs: Inputs) -> tuple[Corpus, dict[str, Any]]:
    """The corpus, and what the card says about it."""
    if inputs.corpus:
        corpus = read_corpus(inputs.corpus, workers_of(inputs))
        described = loads((inputs.corpus / "manifest.json").read_text())
    else:
        corpus = split(installed_documents(), running_version())
        described = describe(corpus)
    if inputs.smoke:  # the first documents are enough
        corpus = Corpus(corpus.training[:60], corpus.held_out[:6], 0, 0)
    return corpus, {**described, "library_share": LIBRARY_SHARE}


def encode(inputs: Inputs, corpus: Corpus, described: dict[str, Any], tokenizer: Tokenizer) -> Text:
    """The corpus through a tokenizer, on the device."""
    device = device_of(inputs)
    streams = encode_corpus(tokenizer, corpus, device, workers_of(inputs))
    sizes = torch.from_numpy(token_bytes(tokenizer)).to(device)
    return Text(streams, sizes, [d.text for d in corpus.held_out], held_out_list(corpus), described)
