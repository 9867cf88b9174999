"""Repetition loops in batches of token ids: the harness's definition, and the tokens that carry a loop on."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_PERIOD = 32  # as harness/client/repetition.py has it; a test holds the two together
MIN_LOOP_TOKENS = 32
MIN_REPEATS = 4
MARKED_TOKENS = 24  # a loop is fought from this length on, before it is long enough to void a stream
MARKED_REPEATS = 3
MARKED_PERIOD = 48


def _breaks(ids: Tensor, period: int, first: int) -> tuple[Tensor, Tensor]:
    """(whether a token equals the token one period earlier, both from column `first` on for the later of the two;
    the last column up to here where it does not, -1 for none). ids: [batch, length] -> two [batch, length]."""
    same = torch.zeros_like(ids, dtype=torch.bool)
    same[:, period:] = ids[:, period:] == ids[:, :-period]
    same[:, :first] = False
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return same, torch.where(same, -1, columns).cummax(1).values


def longest_loops(outputs: Tensor) -> Tensor:
    """Tokens of the longest run that repeats at least four times with a period of up to 32. [batch, n] -> [batch]."""
    total = outputs.shape[1]
    columns = torch.arange(total, device=outputs.device)
    longest = torch.zeros_like(outputs[:, 0])
    for period in range(1, min(MAX_PERIOD, total // MIN_REPEATS) + 1):
        same, last = _breaks(outputs, period, period)
        length = torch.where(same, columns - last + period, 0).amax(1)
        longest = torch.maximum(longest, torch.where(length >= MIN_REPEATS * period, length, 0))
    return longest


def is_loop(outputs: Tensor) -> Tensor:
    """Which streams the harness would void: a loop is most of the output. [batch, n] -> bool [batch]."""
    return longest_loops(outputs) >= max(MIN_LOOP_TOKENS, outputs.shape[1] / 2)


def loop_tokens(ids: Tensor, first: int) -> Tensor:
    """Generated tokens (column `first` on) that carry on a loop: from the third time its period is told.

    Only runs of at least 24 tokens and three times their period count, so that short tables stay as likely as they
    are. The first time may lie in the prompt. ids: [batch, length] -> bool [batch, length].
    """
    length = ids.shape[1]
    columns = torch.arange(length, device=ids.device).expand_as(ids)
    marked = torch.zeros_like(ids, dtype=torch.bool)
    for period in range(1, MARKED_PERIOD + 1):
        same, last = _breaks(ids, period, max(first, period))
        following = torch.where(same, length, columns).flip(1).cummin(1).values.flip(1)
        run = following - last - 1 + period  # the whole run that this token belongs to, first telling included
        long_enough = run >= max(MARKED_TOKENS, MARKED_REPEATS * period)
        marked |= same & long_enough & (columns - last > period)
    return marked
