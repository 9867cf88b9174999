"""What a training command is given: its shared arguments, and the text on the device."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import Corpus, describe, held_out_list, installed_documents, running_version, split
from .streams import LIBRARY_SHARE, Streams, encode_corpus, read_corpus
from .tokenizer import token_bytes
from .trainer import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that training and unlooping share."""
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--smoke", action="store_true", help="few tokens a step, on the CPU")
    parser.add_argument("--corpus", type=Path, help="text gathered by …training.prepare (default: what is installed)")
    parser.add_argument("--tokens-per-step", type=int, default=131072)
    parser.add_argument("--peak-learning-rate", type=float, default=7e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")


def device_of(arguments: argparse.Namespace) -> str:
    """cuda where there is one, but for a smoke run."""
    return "cuda" if torch.cuda.is_available() and not arguments.smoke else "cpu"


def workers_of(arguments: argparse.Namespace) -> int:
    """Processes that read and encode text."""
    return 1 if arguments.smoke else len(os.sched_getaffinity(0))


def plan_of(arguments: argparse.Namespace, device: str) -> Plan:
    """The plan that the arguments ask for."""
    peak, seed = arguments.peak_learning_rate, arguments.seed
    if arguments.smoke:
        return Plan(1024, 256, 512, peak, seed, 1e9, False)
    return Plan(arguments.tokens_per_step, 2048, 8192, peak, seed, 30.0, device == "cuda" and not arguments.no_compile)


@dataclass(frozen=True)
class Text:
    """Encoded text, the held-out texts themselves, and what the card and heldout.json say about them."""

    streams: Streams
    sizes: Tensor  # [vocab] bytes a token stands for
    held_out_texts: list[str]
    held_out: dict[str, object]
    described: dict[str, Any]


def gather(arguments: argparse.Namespace) -> tuple[Corpus, dict[str, Any]]:
    """The corpus, and what the card says about it."""
    if arguments.corpus:
        corpus = read_corpus(arguments.corpus, workers_of(arguments))
        described = loads((arguments.corpus / "manifest.json").read_text())
    else:
        corpus = split(installed_documents(), running_version())
        described = describe(corpus)
    if arguments.smoke:  # the first documents are enough
        corpus = Corpus(corpus.training[:60], corpus.held_out[:6], 0, 0)
    return corpus, {**described, "library_share": LIBRARY_SHARE}


def encode(arguments: argparse.Namespace, corpus: Corpus, described: dict[str, Any], tokenizer: Tokenizer) -> Text:
    """The corpus through a tokenizer, on the device."""
    device = device_of(arguments)
    streams = encode_corpus(tokenizer, corpus, device, workers_of(arguments))
    sizes = torch.from_numpy(token_bytes(tokenizer)).to(device)
    return Text(streams, sizes, [d.text for d in corpus.held_out], held_out_list(corpus), described)
