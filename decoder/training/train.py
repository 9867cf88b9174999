"""`python -m kernarc.decoder.training.train --out DIR`: trains the model that ships, and writes its folder.

One GPU and minutes; with --smoke a tiny model on a CPU in seconds. The learning rate falls to zero at the wall-clock
budget (--minutes) or at a number of steps (--steps, which makes the run repeatable).
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from json import loads
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .bits import bits_per_byte, xz_bits_per_byte
from .card import TrainingFacts, write_facts
from .corpus import Corpus, describe, held_out_list, installed_documents, running_version, split
from .export import save_checkpoint, save_weights
from .layers import Kernels, Tokens
from .losses import LossFunctions, batch_losses
from .model import TrainingModel
from .optimizer import Optimizer, learning_rate
from .shape import SHIPPED, SMOKE, Shape
from .streams import LIBRARY_SHARE, Streams, encode_corpus, read_corpus, windows
from .tokenizer import token_bytes, train_tokenizer


@dataclass(frozen=True)
class Plan:
    """How a run is cut: tokens a step, sequence lengths, budget, and how often it reports."""

    tokens_per_step: int
    length: int
    long_length: int
    peak_learning_rate: float
    seed: int
    seconds: float | None
    steps: int | None
    report_seconds: float
    compiled: bool

    def length_at(self, step: int, progress: float) -> int:
        """Every third step reads long sequences once 40 % of the budget is spent."""
        return self.long_length if progress > 0.4 and step % 3 == 0 else self.length


def say(message: str) -> None:
    """One line of progress on stdout."""
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


class Trainer:
    """A model, its data and its optimiser; `run` trains to the budget."""

    def __init__(self, shape: Shape, plan: Plan, streams: Streams, sizes: Tensor, device: str) -> None:
        torch.manual_seed(plan.seed)
        torch.set_float32_matmul_precision("high")
        kernels = Kernels(torch.bfloat16 if device == "cuda" else torch.float32)
        self.plan, self.streams, self.sizes, self.device = plan, streams, sizes, device
        self.model = TrainingModel(shape, kernels.compiled() if plan.compiled else kernels).to(device)
        self.losses = LossFunctions.compiled() if plan.compiled else LossFunctions()
        self.optimizer = Optimizer(self.model)
        self.layouts = {
            length: Tokens.of(shape, plan.tokens_per_step // length, length, device)
            for length in {plan.length, plan.long_length}
        }
        self.step, self.long_steps = 0, 0
        self.history: list[dict[str, float]] = []

    def train_step(self, progress: float) -> tuple[Tensor, Tensor]:
        """One update; (next-token loss, gradient norm), left on the device."""
        length = self.plan.length_at(self.step, progress)
        ids = self.streams.batch(self.step, self.plan.tokens_per_step // length, length, self.plan.seed)
        limit = length - length // 4 - 1
        generator = torch.Generator().manual_seed(self.plan.seed + self.step)
        start = int(torch.randint(1, limit + 1, (1,), generator=generator))
        losses = batch_losses(self.model, self.losses, ids, self.layouts[length], start)
        losses.total().backward()  # type: ignore[no-untyped-call]
        norm = self.optimizer.step(learning_rate(progress, self.plan.peak_learning_rate))
        self.step += 1
        self.long_steps += length == self.plan.long_length
        return losses.next_token.detach().mean(), norm

    def held_out_report(self) -> dict[str, float]:
        """Bits per byte and draft agreement on the start of the held-out text, in windows of the short length."""
        length, sequences = self.plan.length, self.plan.tokens_per_step // self.plan.length
        stride = max(1, min(length, (len(self.streams.held_out) - length - 1) // sequences))
        ids = windows(self.streams.held_out, length, stride)[:sequences]
        losses = batch_losses(self.model, self.losses, ids, self.layouts[length], length // 2)
        bits = losses.next_token.detach().sum() / self.sizes[ids[:, 1:]].sum() / torch.log(torch.tensor(2.0))
        rates = [float(a) for a in losses.agreement]
        expected = 1 + rates[0] * (1 + rates[1] * (1 + rates[2]))
        drafts = {f"draft_{n}_agreement": rate for n, rate in enumerate(rates, 1)}
        return {"held_out_bits_per_byte": float(bits), **drafts, "expected_acceptance_length": expected}

    def report(self, elapsed: float, loss: Tensor, norm: Tensor) -> None:
        """Measures on held-out text, remembers and prints."""
        line = {"step": self.step, "seconds": elapsed, "loss": float(loss), "gradient_norm": float(norm)}
        line |= self.held_out_report()
        self.history.append({key: round(value, 4) for key, value in line.items()})
        tokens = self.step * self.plan.tokens_per_step
        say(f"{tokens / 1e6:7.1f}M tokens " + " ".join(f"{k}={v:.4g}" for k, v in line.items()))

    def run(self, deadline: float | None, checkpoint: Path) -> float:
        """Trains until the deadline (monotonic seconds) or the number of steps; seconds spent training."""
        started = monotonic()
        next_report = started + self.plan.report_seconds
        progress = 0.0
        while progress < 1.0:
            loss, norm = self.train_step(progress)
            if self.step == 3 or self.step % 10 == 0:
                if not bool(torch.isfinite(loss)):
                    raise FloatingPointError(f"the loss is {float(loss)} at step {self.step}")
                if self.step == 3:  # kernels are compiled by now; the schedule starts here
                    say(f"first steps took {monotonic() - started:.1f} s")
                    started = monotonic()
            now = monotonic()
            if self.plan.steps is not None:
                progress = self.step / self.plan.steps
            elif deadline is not None:
                progress = (now - started) / max(deadline - started, 1.0) if self.step >= 3 else 0.0
            if now >= next_report or progress >= 1.0:
                self.report(monotonic() - started, loss, norm)
                save_weights(self.model, checkpoint)
                next_report = monotonic() + self.plan.report_seconds
        return monotonic() - started


def gather(arguments: argparse.Namespace, workers: int) -> tuple[Corpus, dict[str, Any], dict[str, object]]:
    """The corpus, what the card says about it, and the held-out list."""
    if arguments.corpus:
        folder: Path = arguments.corpus
        corpus = read_corpus(folder, workers)
        return corpus, loads((folder / "manifest.json").read_text()), held_out_list(corpus)
    corpus = split(installed_documents(), running_version())
    return corpus, describe(corpus), held_out_list(corpus)


def shortened(corpus: Corpus, documents: int) -> Corpus:
    """A corpus of the first documents only, for the smoke test."""
    return Corpus(corpus.training[:documents], corpus.held_out[:6], 0, 0)


def final_scores(trainer: Trainer, texts: list[str]) -> dict[str, Any]:
    """Scores for the card: bits per byte in long windows, by position, beside xz; agreement by draft."""
    plan = trainer.plan
    sequences = plan.tokens_per_step // plan.long_length
    bits = bits_per_byte(
        trainer.model,
        trainer.losses,
        trainer.streams.held_out,
        trainer.sizes,
        length=plan.long_length,
        stride=max(1, plan.long_length // 4),
        sequences=sequences,
    )
    positions = {f"{begin}-{end}": round(value, 4) for (begin, end), value in bits.by_position.items()}
    return {
        f"bits per byte, windows of {plan.long_length} tokens": round(bits.overall, 4),
        "bits per byte by position": positions,
        "bits per byte of `xz -9`": round(xz_bits_per_byte(texts), 4),
        "greedy agreement of each draft with the main model": {
            k: round(v, 4) for k, v in trainer.held_out_report().items() if k.startswith("draft")
        },
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kernarc.decoder.training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, a few steps, on the CPU")
    parser.add_argument("--corpus", type=Path, help="text gathered by …training.prepare (default: what is installed)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to use instead of training one")
    parser.add_argument("--minutes", type=float, default=6.0, help="wall-clock budget, reading text included")
    parser.add_argument("--steps", type=int, help="stop after this many steps instead")
    parser.add_argument("--tokens-per-step", type=int, default=131072)
    parser.add_argument("--peak-learning-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    return parser.parse_args(argv)


def plan_of(arguments: argparse.Namespace, device: str) -> Plan:
    """The plan that the arguments ask for."""
    if arguments.smoke:
        steps = arguments.steps or 8
        return Plan(1024, 256, 512, arguments.peak_learning_rate, arguments.seed, None, steps, 1e9, False)
    compiled = device == "cuda" and not arguments.no_compile
    return Plan(
        arguments.tokens_per_step, 2048, 8192, arguments.peak_learning_rate, arguments.seed,
        arguments.minutes * 60, arguments.steps, 30.0, compiled,
    )  # fmt: skip


def facts_of(trainer: Trainer, seconds: float, data: dict[str, Any], scores: dict[str, Any]) -> TrainingFacts:
    """What the card tells."""
    plan, long_share = trainer.plan, trainer.long_steps / max(1, trainer.step)
    device = torch.cuda.get_device_name() if trainer.device == "cuda" else "CPU"
    return TrainingFacts(
        date=datetime.now(UTC).date().isoformat(),
        device=device,
        torch=torch.__version__,
        command=f"python -m kernarc.decoder.training.train --out DIR --steps {trainer.step} --seed {plan.seed}",
        seed=plan.seed,
        steps=trainer.step,
        tokens=trainer.step * plan.tokens_per_step,
        seconds=round(seconds, 1),
        peak_learning_rate=plan.peak_learning_rate,
        tokens_per_step=plan.tokens_per_step,
        sequence_lengths={str(plan.length): 1 - long_share, str(plan.long_length): long_share},
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        data={**data, "library_share": LIBRARY_SHARE},
        history=trainer.history,
        scores=scores,
    )


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    arguments = parse(argv)
    started = monotonic()
    workers = 1 if arguments.smoke else max(1, len(os.sched_getaffinity(0)))
    corpus, data, held_out = gather(arguments, workers)
    shape = SMOKE if arguments.smoke else SHIPPED
    if arguments.smoke:
        corpus = shortened(corpus, 60)
    if arguments.tokenizer:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    else:
        tokenizer = train_tokenizer((d.text for d in corpus.training[:4000]), shape.vocab_size)
    say(f"text and tokenizer ready after {monotonic() - started:.1f} s")
    device = "cuda" if torch.cuda.is_available() and not arguments.smoke else "cpu"
    streams = encode_corpus(tokenizer, corpus, device, workers)
    say(f"{len(streams.library):,} + {len(streams.packages):,} tokens to train on, {len(streams.held_out):,} held out")
    say(f"encoded after {monotonic() - started:.1f} s")
    plan = plan_of(arguments, device)
    sizes = torch.from_numpy(token_bytes(tokenizer)).to(device)
    trainer = Trainer(shape, plan, streams, sizes, device)
    save_checkpoint(trainer.model, tokenizer, held_out, arguments.out)
    seconds = trainer.run(None if plan.seconds is None else started + plan.seconds - 10, arguments.out)
    scores = final_scores(trainer, [d.text for d in corpus.held_out])
    write_facts(facts_of(trainer, seconds, data, scores), arguments.out)
    for name, value in scores.items():
        say(f"{name}: {value}")


if __name__ == "__main__":
    main()
