"""`python -m kernarc.decoder.training.train --out DIR`: trains the model that ships, and writes its folder.

One GPU and minutes; with --smoke a tiny model on a CPU in seconds. First text alone, the learning rate falling to a
fifth of its peak; then text and the model's own continuations together (unloop.py), the rate falling to zero. Each
stage ends at its share of the wall-clock budget, or at a number of steps, which makes the run repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from shutil import copyfile
from time import monotonic
from typing import Any

import click
import torch
from tokenizers import Tokenizer

from .card import TrainingFacts, write_facts
from .corpus import Corpus
from .export import save_checkpoint
from .inputs import Inputs, device_of, encode, gather, input_options, plan_of
from .progress import say
from .scores import run_scores
from .shape import SHIPPED, SMOKE, Shape
from .tokenizer import train_tokenizer
from .trainer import Budget, Trainer
from .unloop import Unlooper, UnloopPlan

SCORING_SECONDS = 15.0  # kept free at the end of a budget


def tokenizer_for(inputs: Inputs, named: Path | None, corpus: Corpus, shape: Shape) -> Tokenizer:
    """The tokenizer that is named, else the corpus's, else one trained on the training text."""
    prepared = inputs.corpus / "tokenizer.json" if inputs.corpus else None
    path = named or (prepared if prepared and prepared.is_file() and not inputs.smoke else None)
    if path:
        return Tokenizer.from_file(str(path))
    return train_tokenizer((d.text for d in corpus.training[::3]), shape.vocab_size)


@dataclass(frozen=True)
class Length:
    """How long the two stages are asked to last: minutes of both and of the second, or steps of each."""

    minutes: float
    unloop_minutes: float
    steps: int | None
    unloop_steps: int | None

    def budgets(self, started: float, *, smoke: bool) -> tuple[Budget, Budget]:
        """When the two stages end; a smoke run counts steps."""
        end = started + self.minutes * 60 - SCORING_SECONDS
        steps = self.steps or (8 if smoke else None)
        unloop_steps = self.unloop_steps or (2 if smoke else None)
        return Budget(end - self.unloop_minutes * 60, steps), Budget(end, unloop_steps)


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


@click.command(help=__doc__)
@input_options
@click.option(
    "--tokenizer", "named", type=click.Path(path_type=Path), help="default: the corpus's own, or one trained now"
)
@click.option("--minutes", default=6.0, help="wall-clock budget, reading text included")
@click.option("--unloop-minutes", default=1.2, help="of these, for the second stage")
@click.option("--steps", type=int, help="steps of the first stage instead")
@click.option("--unloop-steps", type=int, help="steps of the second stage instead")
def main(
    named: Path | None, minutes: float, unloop_minutes: float, steps: int | None, unloop_steps: int | None, **given: Any
) -> None:
    """Command line."""
    inputs, length = Inputs(**given), Length(minutes, unloop_minutes, steps, unloop_steps)
    started = monotonic()
    shape, device = (SMOKE if inputs.smoke else SHIPPED), device_of(inputs)
    corpus, described = gather(inputs)
    tokenizer = tokenizer_for(inputs, named, corpus, shape)
    say(f"text and tokenizer ready after {monotonic() - started:.1f} s")
    text = encode(inputs, corpus, described, tokenizer)
    pools = text.streams
    say(f"{len(pools.library):,} + {len(pools.packages):,} tokens to train on, {len(pools.held_out):,} held out")
    say(f"encoded after {monotonic() - started:.1f} s")
    trainer = Trainer(shape, plan_of(inputs, device), text.streams, text.sizes, device)
    save_checkpoint(trainer.model, tokenizer, text.held_out, inputs.out)
    first, second = length.budgets(started, smoke=inputs.smoke)
    unlooper = Unlooper(trainer, UnloopPlan.smoke() if inputs.smoke else UnloopPlan())
    unlooper.warm_up()
    say(f"buffers ready after {monotonic() - started:.1f} s")
    trained = trainer.run(first, inputs.out)
    copyfile(inputs.out / "model.safetensors", inputs.out.with_name(f"{inputs.out.name}-before-unloop"))
    unlooped = unlooper.run(second, inputs.out)
    facts = facts_of(trainer, unlooper, (trained, unlooped), text.described)
    write_facts(facts, inputs.out)  # a run that fails in its scores keeps what it trained
    facts["scores"] = run_scores(trainer, inputs.out, text.held_out_texts)
    write_facts(facts, inputs.out)


if __name__ == "__main__":
    main()
