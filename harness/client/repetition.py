"""Repetition loops: degenerate output is often the fastest, and says nothing about a decoder."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_PERIOD = 32
MIN_LOOP_TOKENS = 32
MIN_REPEATS = 4


@dataclass(frozen=True, slots=True)
class RepetitionLoop:
    """tokens from `start` on repeat with this period."""

    start: int
    period: int
    length: int


def find_repetition_loop(token_ids: Sequence[int]) -> RepetitionLoop | None:
    """The longest run that repeats with a period of up to 32 tokens, where it is most of the output.

    It counts from 32 tokens, four repeats and half of the output on; sound text (tables) has shorter runs.
    """
    longest: RepetitionLoop | None = None
    total = len(token_ids)
    least = max(MIN_LOOP_TOKENS, total / 2)
    ids = np.asarray(token_ids)
    for period in range(1, min(MAX_PERIOD, total // MIN_REPEATS) + 1):
        if np.count_nonzero(ids[period:] == ids[:-period]) + period < least:
            continue  # however its repeats lie: nearly every stream, at a fortieth of the cost
        run = 0
        for at in range(period, total):
            run = run + 1 if token_ids[at] == token_ids[at - period] else 0
            length = run + period
            if run and length >= MIN_REPEATS * period and (longest is None or length > longest.length):
                longest = RepetitionLoop(at - length + 1, period, length)
    if longest is None or longest.length < least:
        return None
    return longest
