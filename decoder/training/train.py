"""`python -m kernarc.decoder.training.train --out DIR`: trains the model that ships, and writes its folder.

One GPU and minutes; with --smoke a tiny model on a CPU in seconds. First text alone, the learning rate falling to a
fifth of its peak; then text and the model's own continuations together (unloop.py), the rate falling to zero. Each
stage ends at its share of the wall-clock budget, or at a number of steps, which makes the run repeatable.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from shutil import copyfile
from time import monotonic
from typing import Any

import torch
from tokenizers import Tokenizer

from .card import TrainingFacts, write_facts
from .corpus import Corpus
from .export import save_checkpoint
from .inputs import add_arguments, device_of, encode, gather, plan_of
from .progress import say
from .scores import run_scores
from .shape import SHIPPED, SMOKE, Shape
from .tokenizer import train_tokenizer
from .trainer import Budget, Trainer
from .unloop import Unlooper, UnloopPlan

SCORING_SECONDS = 15.0  # kept free at the end of a budget


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kernarc.decoder.training.train", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--tokenizer", type=Path, help="default: the corpus's own, or one trained now")
    parser.add_argument("--minutes", type=float, default=6.0, help="wall-clock budget, reading text included")
    parser.add_argument("--unloop-minutes", type=float, default=1.2, help="of these, for the second stage")
    parser.add_argument("--steps", type=int, help="steps of the first stage instead")
    parser.add_argument("--unloop-steps", type=int, help="steps of the second stage instead")
    return parser.parse_args(argv)


def tokenizer_for(arguments: argparse.Namespace, corpus: Corpus, shape: Shape) -> Tokenizer:
    """The tokenizer that is named, else the corpus's, else one trained on the training text."""
    prepared = arguments.corpus / "tokenizer.json" if arguments.corpus else None
    path = arguments.tokenizer or (prepared if prepared and prepared.is_file() and not arguments.smoke else None)
    if path:
        return Tokenizer.from_file(str(path))
    return train_tokenizer((d.text for d in corpus.training[::3]), shape.vocab_size)


def budgets(arguments: argparse.Namespace, started: float) -> tuple[Budget, Budget]:
    """When the two stages end; a smoke run counts steps."""
    end = started + arguments.minutes * 60 - SCORING_SECONDS
    steps = arguments.steps or (8 if arguments.smoke else None)
    unloop_steps = arguments.unloop_steps or (2 if arguments.smoke else None)
    return Budget(end - arguments.unloop_minutes * 60, steps), Budget(end, unloop_steps)


def command_of(trainer: Trainer, unlooper: Unlooper) -> str:
    """The command that repeats a run, step for step."""
    return (
        "python -m kernarc.decoder.training.train --out DIR --corpus TEXT "
        f"--steps {trainer.step - unlooper.steps} --unloop-steps {unlooper.steps} --seed {trainer.plan.seed}"
    )


def facts_of(trainer: Trainer, unlooper: Unlooper, seconds: tuple[float, float], data: dict[str, Any]) -> TrainingFacts:
    """What the card tells, but for the scores."""
    plan, long_share = trainer.plan, trainer.long_steps / max(1, trainer.step)
    return TrainingFacts(
        date=datetime.now(UTC).date().isoformat(),
        device=torch.cuda.get_device_name() if trainer.device == "cuda" else "CPU",
        torch=torch.__version__,
        command=command_of(trainer, unlooper),
        seed=plan.seed,
        steps=trainer.step - unlooper.steps,
        tokens=(trainer.step - unlooper.steps) * plan.tokens_per_step,
        seconds=round(seconds[0], 1),
        peak_learning_rate=plan.peak_learning_rate,
        tokens_per_step=plan.tokens_per_step,
        sequence_lengths={str(plan.length): 1 - long_share, str(plan.long_length): long_share},
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        unloop=unlooper.facts(seconds[1]),
        data=data,
        history=trainer.history,
        scores={},
    )


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    arguments = parse(argv)
    started = monotonic()
    shape, device = (SMOKE if arguments.smoke else SHIPPED), device_of(arguments)
    corpus, described = gather(arguments)
    tokenizer = tokenizer_for(arguments, corpus, shape)
    say(f"text and tokenizer ready after {monotonic() - started:.1f} s")
    text = encode(arguments, corpus, described, tokenizer)
    pools = text.streams
    say(f"{len(pools.library):,} + {len(pools.packages):,} tokens to train on, {len(pools.held_out):,} held out")
    say(f"encoded after {monotonic() - started:.1f} s")
    trainer = Trainer(shape, plan_of(arguments, device), text.streams, text.sizes, device)
    save_checkpoint(trainer.model, tokenizer, text.held_out, arguments.out)
    first, second = budgets(arguments, started)
    unlooper = Unlooper(trainer, UnloopPlan.smoke() if arguments.smoke else UnloopPlan())
    unlooper.warm_up()
    say(f"buffers ready after {monotonic() - started:.1f} s")
    trained = trainer.run(first, arguments.out)
    copyfile(arguments.out / "model.safetensors", arguments.out.with_name(f"{arguments.out.name}-before-unloop"))
    unlooped = unlooper.run(second, arguments.out)
    facts = facts_of(trainer, unlooper, (trained, unlooped), text.described)
    write_facts(facts, arguments.out)  # a run that fails in its scores keeps what it trained
    facts["scores"] = run_scores(trainer, arguments.out, text.held_out_texts)
    write_facts(facts, arguments.out)


if __name__ == "__main__":
    main()
