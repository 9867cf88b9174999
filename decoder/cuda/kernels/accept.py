"""Greedy acceptance on the device: how many drafts the target agrees with, and every length that follows from it."""

import torch
import triton
import triton.language as tl

from .launch import LENGTH, MTP_LENGTH, PLAIN, RING, STATE_LENGTH, Launch, enter


def accept_naive(drafts: list[int], targets: list[int]) -> int:
    """Twin: the drafts before the first that differs from the target's own choice."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == targets[accepted]:
        accepted += 1
    return accepted


@triton.jit
def accept_kernel(p_targets, p_tokens, p_positions, p_out, DRAFTS: tl.constexpr, PDL: tl.constexpr):
    """One program. The verify rows are positions LENGTH … LENGTH + DRAFTS."""
    enter(PDL)
    length = tl.load(p_positions + LENGTH)
    accepted = 0
    agreed = 1
    for i in tl.static_range(DRAFTS):
        same = tl.load(p_tokens + (length + 1 + i) % RING) == tl.load(p_targets + i)
        agreed = agreed * same.to(tl.int32)
        accepted = accepted + agreed
    for i in tl.static_range(DRAFTS + 1):  # beyond the accepted ones these slots are rewritten before they are read
        target = tl.load(p_targets + i)
        tl.store(p_tokens + (length + 1 + i) % RING, target)
        tl.store(p_out + 1 + i, target)
    tl.store(p_out, accepted)
    tl.store(p_positions + STATE_LENGTH, length)
    tl.store(p_positions + LENGTH, length + accepted + 1)
    if DRAFTS > 0:
        tl.store(p_positions + MTP_LENGTH, length)


def accept(
    targets: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    num_drafts: int,
    launch: Launch = PLAIN,
) -> None:
    """targets int64 [k + 1], tokens int64 [32] by position, positions int32 → out int64 [≥ k + 2].

    out[0] = drafts accepted, out[1:] = the target's tokens, of which the first out[0] + 1 are the step's result.
    """
    accept_kernel[(1,)](targets, tokens, positions, out, DRAFTS=num_drafts, num_warps=4, **launch.arguments())
