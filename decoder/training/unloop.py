"""`python -m kernarc.decoder.training.unloop MODEL --corpus TEXT --out DIR`: makes greedy text stop repeating itself.

A small model's greedy text soon runs in a loop, and a looping stream says nothing about a decoder. So every step reads
text of the corpus as training does, and beside it the model's own greedy continuations of such text, in which the
tokens that carry on a loop are made unlikely: sequence-level unlikelihood (Welleck et al. 2020), over all layers. The
MTP layer learns on both, since its drafts are judged on the model's own text. `…training.train` ends with the same;
this is for a model that is there already. One GPU and a minute or two; --smoke on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from time import monotonic
from typing import Any

import click
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .card import add_stage
from .export import load_weights, save_weights
from .inputs import Inputs, device_of, encode, gather, input_options, plan_of
from .loops import loop_tokens
from .losses import BatchLosses, batch_losses, unlikelihood
from .model import TrainingModel
from .rollout import Rollout
from .scores import loop_rates, random_excerpts, run_scores
from .shape import Shape
from .trainer import Budget, Trainer

LEAST_MARKED = 1 / 256  # of a batch's tokens: below this share the unlikelihood fades instead of shouting about few


@dataclass(frozen=True)
class UnloopPlan:
    """(prompt, new tokens) of the rollouts, one of these a step in turn; the loss's weight; the first learning rate.

    stretch: how far along their change the weights are put at the end; 1 is where training left them. A tenth past it
    broke the last loops after long prompts (of 64 streams at 4,096 tokens none; at 1.0 two of 48, at 0.8 three of 24,
    by `kernarc-gate bench`), and costs bits per byte.
    """

    rollouts: tuple[tuple[int, int], ...] = ((128, 128), (256, 256), (128, 128), (1792, 256))
    weight: float = 1.0
    learning_rate: float = 1.4e-3
    watched_depth: int = 128
    stretch: float = 1.1

    @classmethod
    def smoke(cls) -> UnloopPlan:
        """Short ones for a CPU."""
        return cls(((64, 64), (192, 64)), watched_depth=64)


class Unlooper:
    """Goes on training a trainer's model; each step is one update from text and rollouts together."""

    def __init__(self, trainer: Trainer, plan: UnloopPlan) -> None:
        self.trainer, self.plan = trainer, plan
        self.rollouts: dict[tuple[int, int], Rollout] = {}
        self.steps = 0

    def rollout_losses(self) -> tuple[BatchLosses, Tensor, Tensor]:
        """Losses on own continuations, the unlikelihood of their loops, and the share of new tokens in loops."""
        trainer = self.trainer
        prompt, new = self.plan.rollouts[self.steps % len(self.plan.rollouts)]
        ids = self.continuations(prompt, new)
        marked = loop_tokens(ids, prompt)[:, 1:].flatten()
        window = trainer.window_start(prompt, prompt + new)
        found = batch_losses(trainer.model, trainer.losses, ids, trainer.layout(prompt + new), window)
        least = max(1.0, LEAST_MARKED * len(marked))
        loops = (unlikelihood(found.next_token) * marked).sum() / marked.sum().clamp_min(least)
        return found, loops, marked.sum() / (len(ids) * new)

    def continuations(self, prompt: int, new: int) -> Tensor:
        """[sequences, prompt + new + 1] training text and what the model makes of it: one pass of tokens."""
        trainer = self.trainer
        sequences = trainer.plan.tokens_per_step // (prompt + new)
        if (prompt, new) not in self.rollouts:  # one token more: what the last place predicts
            self.rollouts[prompt, new] = Rollout(trainer.model, sequences, prompt, new + 1)
        excerpts = trainer.streams.batch(trainer.step, sequences, prompt, trainer.plan.seed + 1)[:, :prompt]
        return self.rollouts[prompt, new].run(excerpts).clone()

    def warm_up(self) -> None:
        """Makes the buffers and graphs of all rollouts, so that no budget is spent on them, or fails at once."""
        for prompt, new in dict.fromkeys(self.plan.rollouts):
            self.continuations(prompt, new)

    def step(self, rate: float) -> tuple[Tensor, Tensor]:
        """One update; (mean next-token loss on text, share of rolled-out tokens that carry on a loop)."""
        trainer = self.trainer
        text = trainer.text_losses(trainer.plan.length_at(trainer.step, 1.0))
        text.total().backward()  # type: ignore[no-untyped-call]
        found, loops, share = self.rollout_losses()
        (self.plan.weight * loops + found.draft_total()).backward()  # type: ignore[no-untyped-call]
        trainer.update(rate)
        self.steps += 1
        return text.next_token.detach().mean(), share

    def report(self, elapsed: float, loss: Tensor, share: Tensor) -> None:
        """A line that tells the share of looping continuations too."""
        excerpts = random_excerpts(self.trainer.streams.held_out, 64, self.plan.watched_depth)
        loops = loop_rates(self.trainer.model, excerpts, (128,))[128]
        measured = {"seconds": elapsed, "loss": float(loss), "looping_tokens": float(share)}
        self.trainer.report(measured | {"held_out_loops_at_128": loops})

    def run(self, budget: Budget, checkpoint: Path) -> float:
        """Steps to the budget, the rate flat for a fifth and then falling to zero; seconds spent."""
        before = {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}
        started, progress = monotonic(), 0.0
        next_report = started + self.trainer.plan.report_seconds / 2
        while progress < 1.0:
            loss, share = self.step(self.plan.learning_rate * min(1.0, 1.25 * (1.0 - progress)))
            if self.steps % 10 == 0:
                self.trainer.check(loss)
            progress = budget.progress(started, self.steps)
            if progress >= 1.0:
                stretch_change(self.trainer.model, before, self.plan.stretch)
            if monotonic() >= next_report or progress >= 1.0:
                self.report(monotonic() - started, loss, share)
                save_weights(self.trainer.model, checkpoint)
                next_report = monotonic() + self.trainer.plan.report_seconds / 2
        return monotonic() - started

    def facts(self, seconds: float) -> dict[str, object]:
        """What the card tells of this stage."""
        return {
            "steps": self.steps,
            "seconds": round(seconds, 1),
            "learning_rate": self.plan.learning_rate,
            "stretch": self.plan.stretch,
            "rollouts": [f"{prompt} + {new}" for prompt, new in self.plan.rollouts],
            "tokens_of_text": self.steps * self.trainer.plan.tokens_per_step,
        }


@torch.no_grad()
def stretch_change(model: TrainingModel, before: dict[str, Tensor], stretch: float) -> None:
    """Puts every weight at this multiple of its change since `before`: below 1 less of it, above 1 past its end."""
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.lerp(before[name], parameter, stretch))


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path))
@input_options
@click.option("--minutes", default=2.0, help="wall-clock budget, reading text included")
@click.option("--steps", type=int, help="stop after this many steps instead")
@click.option("--learning-rate", default=1.4e-3)
@click.option("--stretch", default=1.1, help="of the change in the weights; 1 leaves it")
def main(model: Path, minutes: float, steps: int | None, learning_rate: float, stretch: float, **given: Any) -> None:
    """Command line."""
    inputs = Inputs(**given)
    started = monotonic()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    device = device_of(inputs)
    text = encode(inputs, *gather(inputs), tokenizer)
    shape = Shape.from_directory(model)
    trainer = Trainer(shape, plan_of(inputs, device), text.streams, text.sizes, device)
    load_weights(trainer.model, model)
    copytree(model, inputs.out, dirs_exist_ok=True)
    plan = UnloopPlan.smoke() if inputs.smoke else UnloopPlan()
    plan = replace(plan, learning_rate=learning_rate, stretch=stretch)
    unlooper = Unlooper(trainer, plan)
    deadline = None if steps else started + minutes * 60
    seconds = unlooper.run(Budget(deadline, steps), inputs.out)
    add_stage(inputs.out, unlooper.facts(seconds), run_scores(trainer, inputs.out, text.held_out_texts))


if __name__ == "__main__":
    main()
