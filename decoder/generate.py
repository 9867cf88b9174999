"""Greedy speculative generation: the loop, and the session it drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_SPECULATIVE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Step:
    """One decoder step as the caller sees it.

    token_ids: the new tokens, at least one. drafted: drafts verified in this step. accepted: drafts among `token_ids`,
    counted after trimming at a stop token or at max_tokens.
    """

    token_ids: tuple[int, ...]
    drafted: int
    accepted: int


class Session(Protocol):
    """One sequence on one device."""

    context_length: int  # tokens whose state is held

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Reset, read the whole prompt, return the first greedy token."""
        ...

    def step(self, num_drafts: int) -> tuple[list[int], int]:
        """Draft, verify, commit: (1 … num_drafts + 1 new tokens, how many of them were drafts)."""
        ...
