"""Step time or acceptance: ln TPOT ratio = ln step ratio − ln tokens-per-step ratio, so every effect splits exactly."""

import math
from collections.abc import Sequence

from .intervals import DepthInterval, depth_intervals
from .outcomes import Attribution
from .pairing import DepthPairs

NEGLIGIBLE = 0.002  # effects below 0.2 % are "unchanged" in words


def attribute(
    depths: Sequence[DepthPairs], *, confidence: float, n_resamples: int, seed: int
) -> list[Attribution | None]:
    """Step and acceptance effects of every depth with the same kind of interval as the speed; None without steps."""
    split = [(pairs.log_step_ratios(), pairs.log_tokens_per_step_ratios()) for pairs in depths]
    known = [index for index, (step, tokens) in enumerate(split) if step is not None and tokens is not None]
    result: list[Attribution | None] = [None] * len(depths)
    if not known:
        return result
    steps = [step for step, _ in split if step is not None]
    slower_by_tokens = [[-values for values in tokens] for _, tokens in split if tokens is not None]
    step_intervals = depth_intervals(steps, confidence=confidence, n_resamples=n_resamples, seed=seed)
    token_intervals = depth_intervals(slower_by_tokens, confidence=confidence, n_resamples=n_resamples, seed=seed)
    for index, step_interval, token_interval in zip(known, step_intervals, token_intervals, strict=True):
        result[index] = _attribution(step_interval, token_interval)
    return result


def in_words(effect: float, attribution: Attribution | None) -> str:
    """One clause on where an effect (a fraction, +0.02 = 2 % slower) comes from."""
    if attribution is None:
        return "the events of this server are not steps, so step time and acceptance cannot be told apart"
    step, acceptance = attribution.step_effect, attribution.acceptance_effect
    parts = [_step_words(step), _acceptance_words(acceptance)]
    if abs(effect) < NEGLIGIBLE and max(abs(step), abs(acceptance)) < NEGLIGIBLE:
        return "step time and acceptance are unchanged"
    cause = max((abs(math.log1p(step)), "the step"), (abs(math.log1p(acceptance)), "the acceptance of drafts"))[1]
    return f"{parts[0]}, {parts[1]}: the effect is from {cause}"


def _step_words(effect: float) -> str:
    if abs(effect) < NEGLIGIBLE:
        return "each step takes as long as before"
    return f"each step takes {abs(effect):.1%} {'longer' if effect > 0 else 'less'}"


def _acceptance_words(effect: float) -> str:
    """acceptance_effect +x means tokens a step fell to 1 / (1 + x)."""
    if abs(effect) < NEGLIGIBLE:
        return "as many tokens a step"
    tokens = 1 / (1 + effect) - 1
    return f"{abs(tokens):.1%} {'fewer' if tokens < 0 else 'more'} tokens a step"


def _attribution(step: DepthInterval, acceptance: DepthInterval) -> Attribution:
    return Attribution(
        step_effect=math.expm1(step.point_estimate),
        step_low=fraction(step.low),
        step_high=fraction(step.high),
        acceptance_effect=math.expm1(acceptance.point_estimate),
        acceptance_low=fraction(acceptance.low),
        acceptance_high=fraction(acceptance.high),
    )


def fraction(log_value: float) -> float | None:
    """A log ratio as a fraction; None where it is not defined."""
    return math.expm1(log_value) if math.isfinite(log_value) else None
