"""How many tokens to draft: a fixed number, or by step the one with the most tokens a millisecond.

A step with k drafts yields 1 + a₁ + a₁a₂ + … + a₁…a_k tokens on average, aᵢ the chance that draft i is accepted when
those before it were, and takes as long as was measured at load. The output does not depend on k, only the speed does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

MEMORY_STEPS = 32.0  # how far back acceptance is remembered: after so many steps an observation weighs 1/e
FIRST_GUESS = 0.75  # of a draft's chance, before anything was seen
GUESS_WEIGHT = 4.0  # observations that the guess counts as
ROUNDS, STEPS_A_ROUND = 5, 3
SWITCH_GAIN = 1.02  # a change must promise this much: the step after it does not overlap its predecessor


class DraftLength(Protocol):
    """Chooses the drafts of a step."""

    def choose(self) -> int:
        """Drafts for the next step."""
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """How a step ended: the first `accepted` of its drafts were right."""
        ...


class FixedLength:
    """Always the same number."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def choose(self) -> int:
        """That number."""
        return self._num_drafts

    def observe(self, drafted: int, accepted: int) -> None:
        """Nothing is learnt."""


class AdaptiveLength:
    """The number with the best expected tokens a millisecond, from recent acceptance by position."""

    def __init__(self, step_ms: Mapping[int, float], start: int) -> None:
        """step_ms: milliseconds of a step by its number of drafts; only these are chosen. start: the first choice."""
        self._step_ms = dict(sorted(step_ms.items()))
        positions = max(self._step_ms)
        self._tried = [0.0] * positions  # drafts at this position whose predecessors were right, old ones fading
        self._right = [0.0] * positions
        self._choice = start

    def choose(self) -> int:
        """The best number now; the last one unless another is clearly better."""
        rates = {count: tokens / self._step_ms[count] for count, tokens in self._expected_tokens().items()}
        best = max(rates, key=lambda count: rates[count])
        if rates[best] > SWITCH_GAIN * rates[self._choice]:
            self._choice = best
        return self._choice

    def observe(self, drafted: int, accepted: int) -> None:
        """Positions up to the first wrong draft were tried; everything older fades, tried again or not."""
        kept = 1.0 - 1.0 / MEMORY_STEPS
        for place in range(len(self._tried)):
            self._tried[place] *= kept
            self._right[place] *= kept
            if place < drafted and place <= accepted:
                self._tried[place] += 1.0
                self._right[place] += place < accepted

    def acceptance(self) -> list[float]:
        """The chance of each position given the ones before; what was hardly tried is thought as good as the previous
        position, so that longer drafts are tried again in time."""
        chances, previous = [], FIRST_GUESS
        for tried, right in zip(self._tried, self._right, strict=True):
            previous = (right + GUESS_WEIGHT * previous) / (tried + GUESS_WEIGHT)
            chances.append(previous)
        return chances

    def _expected_tokens(self) -> dict[int, float]:
        tokens, product = [1.0], 1.0
        for chance in self.acceptance():
            product *= chance
            tokens.append(tokens[-1] + product)
        return {count: tokens[count] for count in self._step_ms}


class Stepping(Protocol):
    """What can be timed."""

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Read a prompt."""
        ...

    def step(self, num_drafts: int) -> tuple[list[int], int]:
        """One step."""
        ...


def measure_step_ms(session: Stepping, counts: Sequence[int], *, prompt_tokens: int) -> dict[int, float]:
    """Milliseconds of a step by its number of drafts, after a prompt of zeros: the fastest seen.

    Counts take turns, so that a busy moment of the machine does not fall on one of them; the first step of each turn
    warms up what changes with the count.
    """
    step_ms = dict.fromkeys(counts, float("inf"))
    for turn in range(ROUNDS + 1):  # the first round compiles and captures
        session.prefill([0] * prompt_tokens)
        for count in counts:
            for step in range(STEPS_A_ROUND):
                start = time.perf_counter()
                session.step(count)
                if turn and step:
                    step_ms[count] = min(step_ms[count], (time.perf_counter() - start) * 1e3)
    return step_ms


def timed_tokens(counts: Sequence[int]) -> int:
    """How much of a window measure_step_ms may fill behind its prompt."""
    return STEPS_A_ROUND * sum(count + 1 for count in counts) + max(counts)
