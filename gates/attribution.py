"""Step time or acceptance: ln TPOT ratio = ln step ratio − ln tokens-per-step ratio, so every effect splits exactly."""

import math
from collections.abc import Sequence

from .bootstrap import Floats
from .intervals import DepthInterval, depth_intervals
from .outcomes import Attribution
from .pairing import DepthPairs


def attribute(
    depths: Sequence[DepthPairs],
    *,
    confidence: float,
    n_resamples: int,
    seed: int,
    candidate_second: Sequence[bool] | None = None,
) -> list[Attribution | None]:
    """Step and acceptance effects of every depth with the same kind of interval as the speed; None without steps."""

    def intervals(ratios: list[list[Floats]]) -> list[DepthInterval]:
        return depth_intervals(
            ratios, confidence=confidence, n_resamples=n_resamples, seed=seed, candidate_second=candidate_second
        )

    split = [(pairs.log_step_ratios(), pairs.log_tokens_per_step_ratios()) for pairs in depths]
    known = [index for index, (step, tokens) in enumerate(split) if step is not None and tokens is not None]
    result: list[Attribution | None] = [None] * len(depths)
    if not known:
        return result
    steps = [step for step, _ in split if step is not None]
    slower_by_tokens = [[-values for values in tokens] for _, tokens in split if tokens is not None]
    for index, step_interval, token_interval in zip(known, intervals(steps), intervals(slower_by_tokens), strict=True):
        result[index] = _attribution(step_interval, token_interval)
    return result


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
