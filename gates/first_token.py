"""Time to first token, candidate against baseline: told with intervals of the same kind, never judged."""

import math
from collections.abc import Sequence

from .attribution import fraction
from .intervals import depth_intervals
from .outcomes import FirstTokenEffect
from .pairing import DepthPairs


def first_token_effects(
    depths: Sequence[DepthPairs],
    *,
    confidence: float,
    n_resamples: int,
    seed: int,
    candidate_second: Sequence[bool] | None = None,
) -> list[FirstTokenEffect | None]:
    """The effect on the time to first token at every depth, simultaneous over depths; None where a pair has none."""
    ratios = [pairs.log_ttft_ratios() for pairs in depths]
    known = {index: launches for index, launches in enumerate(ratios) if launches is not None}
    result: list[FirstTokenEffect | None] = [None] * len(depths)
    if not known:
        return result
    intervals = depth_intervals(
        list(known.values()),
        confidence=confidence,
        n_resamples=n_resamples,
        seed=seed,
        candidate_second=candidate_second,
    )
    for index, interval in zip(known, intervals, strict=True):
        result[index] = FirstTokenEffect(
            effect=math.expm1(interval.point_estimate), low=fraction(interval.low), high=fraction(interval.high)
        )
    return result
