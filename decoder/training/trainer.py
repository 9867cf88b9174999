"""A model, its data and its optimiser, trained on text to a budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from .export import save_weights
from .layers import Kernels, Tokens
from .losses import BatchLosses, LossFunctions, batch_losses
from .model import TrainingModel
from .optimizer import Optimizer, learning_rate
from .progress import say
from .shape import Shape
from .streams import Streams, windows


@dataclass(frozen=True)
class Plan:
    """How a run is cut: tokens a pass, sequence lengths, learning rate, and how often it reports."""

    tokens_per_step: int
    length: int
    long_length: int
    peak_learning_rate: float
    seed: int
    report_seconds: float
    compiled: bool
    final_share: float = 0.2  # of the peak learning rate, where training on text alone ends

    def length_at(self, step: int, progress: float) -> int:
        """Every third step reads long sequences once 40 % of the budget is spent."""
        return self.long_length if progress > 0.4 and step % 3 == 0 else self.length


@dataclass(frozen=True)
class Budget:
    """When a stage ends: at a moment (monotonic seconds), or after a number of steps."""

    deadline: float | None = None
    steps: int | None = None

    def progress(self, started: float, steps: int) -> float:
        """Share of the budget that is spent, from 0."""
        if self.steps is not None:
            return steps / max(1, self.steps)
        assert self.deadline is not None, "a budget names a deadline or a number of steps"
        return (monotonic() - started) / max(self.deadline - started, 1.0)


class Trainer:
    """A model, its data and its optimiser; `run` trains on text to the budget."""

    def __init__(self, shape: Shape, plan: Plan, streams: Streams, sizes: Tensor, device: str) -> None:
        torch.manual_seed(plan.seed)
        torch.set_float32_matmul_precision("high")
        kernels = Kernels(torch.bfloat16 if device == "cuda" else torch.float32)
        self.plan, self.streams, self.sizes, self.device = plan, streams, sizes, device
        self.model = TrainingModel(shape, kernels.compiled() if plan.compiled else kernels).to(device)
        self.losses = LossFunctions.compiled() if plan.compiled else LossFunctions()
        self.optimizer = Optimizer(self.model)
        self._layouts: dict[int, Tokens] = {}
        self.step, self.long_steps = 0, 0
        self.history: list[dict[str, float]] = []

    def layout(self, length: int) -> Tokens:
        """The tokens of one pass, cut into sequences of this length."""
        if length not in self._layouts:
            sequences = self.plan.tokens_per_step // length
            self._layouts[length] = Tokens.of(self.model.shape, sequences, length, self.device)
        return self._layouts[length]

    def window_start(self, first: int, length: int) -> int:
        """Where the second and third drafts are learnt: a quarter of the length, from `first` on where it fits."""
        last = length - length // 4 - 1
        generator = torch.Generator().manual_seed(self.plan.seed + self.step)
        return int(torch.randint(min(first, last), last + 1, (1,), generator=generator))

    def text_losses(self, length: int) -> BatchLosses:
        """Losses on the text of this step, in sequences of this length."""
        ids = self.streams.batch(self.step, self.plan.tokens_per_step // length, length, self.plan.seed)
        self.long_steps += length == self.plan.long_length
        return batch_losses(self.model, self.losses, ids, self.layout(length), self.window_start(1, length))

    def update(self, rate: float) -> Tensor:
        """One step of the optimiser; the gradient norm."""
        norm = self.optimizer.step(rate)
        self.step += 1
        return norm

    def train_step(self, progress: float) -> tuple[Tensor, Tensor]:
        """One update from text; (next-token loss, gradient norm), left on the device."""
        losses = self.text_losses(self.plan.length_at(self.step, progress))
        losses.total().backward()  # type: ignore[no-untyped-call]
        norm = self.update(learning_rate(progress, self.plan.peak_learning_rate, self.plan.final_share))
        return losses.next_token.detach().mean(), norm

    def held_out_report(self) -> dict[str, float]:
        """Bits per byte and draft agreement on the start of the held-out text, in windows of the short length."""
        length, sequences = self.plan.length, self.plan.tokens_per_step // self.plan.length
        stride = max(1, min(length, (len(self.streams.held_out) - length - 1) // sequences))
        ids = windows(self.streams.held_out, length, stride)[:sequences]
        losses = batch_losses(self.model, self.losses, ids, self.layout(length), length // 2)
        bits = losses.next_token.detach().sum() / self.sizes[ids[:, 1:]].sum() / torch.log(torch.tensor(2.0))
        rates = [float(a) for a in losses.agreement]
        expected = 1 + rates[0] * (1 + rates[1] * (1 + rates[2]))
        drafts = {f"draft_{n}_agreement": rate for n, rate in enumerate(rates, 1)}
        return {"held_out_bits_per_byte": float(bits), **drafts, "expected_acceptance_length": expected}

    def report(self, measured: dict[str, float]) -> None:
        """Measures on held-out text, remembers and prints, beside what was measured in training."""
        line = {"step": self.step, **measured, **self.held_out_report()}
        self.history.append({key: round(value, 4) for key, value in line.items()})
        tokens = self.step * self.plan.tokens_per_step
        say(f"{tokens / 1e6:7.1f}M tokens " + " ".join(f"{k}={v:.4g}" for k, v in line.items()))

    def check(self, loss: Tensor) -> None:
        """Stops a run that diverged."""
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(f"the loss is {float(loss)} at step {self.step}: lower --peak-learning-rate")

    def run(self, budget: Budget, checkpoint: Path) -> float:
        """Trains to the budget, saving weights with every report; seconds spent, after kernels are compiled."""
        started = monotonic()
        next_report = started + self.plan.report_seconds
        progress = 0.0
        while progress < 1.0:
            loss, norm = self.train_step(progress)
            if self.step == 3 or self.step % 10 == 0:
                self.check(loss)
            if self.step == 3:  # kernels are compiled by now; the schedule starts here
                say(f"first steps took {monotonic() - started:.1f} s")
                started = monotonic()
            progress = budget.progress(started, self.step) if self.step >= 3 else 0.0
            if monotonic() >= next_report or progress >= 1.0:
                elapsed = {"seconds": monotonic() - started}
                self.report(elapsed | {"loss": float(loss), "gradient_norm": float(norm)})
                save_weights(self.model, checkpoint)
                next_report = monotonic() + self.plan.report_seconds
        return monotonic() - started
