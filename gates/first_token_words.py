"""The time to first token in words: what the candidate does to it, beside a verdict that does not judge it."""

from ..harness.format import count, fixed, speed_up, speed_up_interval
from .outcomes import DepthOutcome, FirstTokenEffect, GateOutcome

SAID_AS_A_FACTOR = 1.0  # effects from here on: "3.1x later" reads better than "210.0 % later"


def first_token_words(outcome: GateOutcome) -> str:
    """The paired ratio at every depth with its interval: "First token … ×3.10 (3.02–3.19) at depth 32."; "" without."""
    told = [
        f"{_ratio(depth.first_token)} at depth {count(depth.depth)}" for depth in outcome.depths if depth.first_token
    ]
    if not told:
        return ""
    return f"First token, {outcome.candidate} to {outcome.baseline} (not gated): {', '.join(told)}."


def later_first_token(outcome: GateOutcome) -> str:
    """ "first token 3.1x later at depth 32: not gated", where the whole interval lies above the margin; else ""."""
    late = [(depth, effect) for depth in outcome.depths if (effect := _is_late(depth, outcome.margin))]
    if not late:
        return ""
    worst, effect = max(late, key=lambda pair: pair[1].effect)
    elsewhere = f" and at {len(late) - 1} more depth{'s' if len(late) > 2 else ''}" if len(late) > 1 else ""
    return f"first token {_size(effect.effect)} later at depth {count(worst.depth)}{elsewhere}: not gated"


def _is_late(depth: DepthOutcome, margin: float) -> FirstTokenEffect | None:
    effect = depth.first_token
    return effect if effect is not None and effect.low is not None and effect.low > margin else None


def _size(effect: float) -> str:
    return f"{fixed(1 + effect, 1)}x" if effect >= SAID_AS_A_FACTOR else f"{fixed(effect * 100, 1)} %"


def _ratio(effect: FirstTokenEffect) -> str:
    if effect.low is None or effect.high is None:
        return f"{speed_up(1 + effect.effect)} (interval unknown)"
    return f"{speed_up(1 + effect.effect)} ({speed_up_interval(1 + effect.low, 1 + effect.high)})"
