"""Greedy choice over the whole vocabulary at half the bytes: an int8 copy of the head rules out, bf16 rows decide.

The logit of token n is w_n·x with w_n the bf16 row as stored, x the fp16 hidden state, summed in fp32. The int8 copy
ŵ_n gives ŵ_n·x, and by Cauchy and Schwarz |w_n·x − ŵ_n·x| ≤ ‖w_n − ŵ_n‖·‖x‖. So a token whose upper bound lies below
the largest lower bound cannot be the best; the few others are computed from their bf16 rows. The result is that of the
whole bf16 head: nothing is assumed about the model, only the number of rows read twice depends on it. (int8, not e4m3:
under one scale a block its error is a third, 0.9 % of ‖w‖ against 2.7 % for normal weights: far fewer are left.)
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from .launch import MAX_ROWS, PLAIN, Launch, enter
from .packing import BLOCK, SLICE_ROWS, PackedLinear, pack_int8, quantise
from .products import Products

ROUNDING = 1e-3  # fp32 sums of both products, relative to ‖w‖·‖x‖: K·2⁻²⁴ is 3·10⁻⁴ at K = 5,120
TOKENS = 1024  # of a program


@dataclass(frozen=True, slots=True)
class ScreenedHead:
    """rows bf16 [V, D] as stored; screen, their int8 copy; error fp32 [V], the bound above divided by ‖x‖."""

    rows: torch.Tensor
    screen: PackedLinear
    error: torch.Tensor

    @classmethod
    def build(cls, rows: torch.Tensor, *, name: str) -> Self:
        """rows [V, D]. Raises CheckpointError for a shape that does not pack."""
        values, scale = quantise(rows, torch.int8)
        return cls(rows, pack_int8(values, scale, name=name), error_bound(rows, values, scale))


class HeadScratch:
    """Buffers for up to 16 rows, allocated once."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        blocks = -(-vocab_size // TOKENS)
        self.logits = torch.empty(MAX_ROWS * vocab_size, dtype=torch.float32, device=device)
        self.low = torch.empty(MAX_ROWS * blocks, dtype=torch.float32, device=device)
        self.best = torch.empty(MAX_ROWS * blocks, dtype=torch.float32, device=device)
        self.token = torch.empty(MAX_ROWS * blocks, dtype=torch.int64, device=device)


def error_bound(rows: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [V]: ‖w_n − ŵ_n‖ plus what rounding may add to either product, a unit of ‖x‖."""
    error = torch.empty(len(rows), device=rows.device)
    for first in range(0, len(rows), SLICE_ROWS):
        exact = rows[first : first + SLICE_ROWS].float()
        of_block = scale[first // BLOCK : (first + SLICE_ROWS) // BLOCK].float()
        wide = of_block.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: len(exact), : exact.shape[1]]
        copy = values[first : first + SLICE_ROWS].float() * wide
        rounding = ROUNDING * (exact.norm(dim=1) + copy.norm(dim=1))
        error[first : first + SLICE_ROWS] = (exact - copy).norm(dim=1) + rounding
    return error


def screened_argmax_naive(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Twin: hidden [R, D], rows [V, D] → int64 [R], the lowest id on a tie."""
    return (hidden.float() @ rows.float().T).argmax(-1)


@triton.jit
def bounds(p_hidden, p_logits, p_error, block, row, vocab, D: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr):
    """One row x (fp32, zero beyond D), and the screen's logits and error bounds of one block of tokens."""
    o_d = tl.arange(0, WIDE)
    x = tl.load(p_hidden + row * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    o_n = block * TOKENS + tl.arange(0, TOKENS)
    logit = tl.load(p_logits + row * vocab + o_n, mask=o_n < vocab, other=float("-inf"))
    error = tl.load(p_error + o_n, mask=o_n < vocab, other=0.0) * tl.sqrt(tl.sum(x * x, axis=0))
    return x, logit, error


@triton.jit
def lower_bound_kernel(
    p_hidden, p_logits, p_error, p_low, vocab, blocks,
    D: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, row): the largest lower bound of a block of tokens."""
    enter(PDL)
    block, row = tl.program_id(0), tl.program_id(1)
    _, logit, error = bounds(p_hidden, p_logits, p_error, block, row, vocab, D, WIDE, TOKENS)
    tl.store(p_low + row * blocks + block, tl.max(logit - error, axis=0))


@triton.jit
def decide_kernel(
    p_hidden, p_rows, p_logits, p_error, p_low, p_best, p_token, vocab, blocks,
    D: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, row): the best of a block's tokens that the screen leaves, by their bf16 rows."""
    enter(PDL)
    block, row = tl.program_id(0), tl.program_id(1)
    x, logit, error = bounds(p_hidden, p_logits, p_error, block, row, vocab, D, WIDE, TOKENS)
    o_b = tl.arange(0, BLOCKS)
    low = tl.max(tl.load(p_low + row * blocks + o_b, mask=o_b < blocks, other=float("-inf")), axis=0)
    o_n = tl.arange(0, TOKENS)
    o_d = tl.arange(0, WIDE)
    left = (logit + error >= low) & (logit > float("-inf"))
    best = float("-inf")
    token = vocab
    count = tl.sum(left.to(tl.int32), axis=0)
    while count > 0:  # in the order of their ids, so that the lowest wins a tie
        at = tl.min(tl.where(left, o_n, TOKENS), axis=0)
        n = block * TOKENS + at
        w = tl.load(p_rows + n.to(tl.int64) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        exact = tl.sum(w * x, axis=0)
        token = tl.where(exact > best, n, token)
        best = tl.maximum(exact, best)
        left = left & (o_n != at)
        count -= 1
    tl.store(p_best + row * blocks + block, best)
    tl.store(p_token + row * blocks + block, token.to(tl.int64))


@triton.jit
def pick_kernel(p_best, p_token, p_out, vocab, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Program row: the best of all blocks, the lowest id on a tie; 0 where every logit is NaN."""
    enter(PDL)
    row = tl.program_id(0)
    o_b = tl.arange(0, BLOCKS)
    best = tl.load(p_best + row * blocks + o_b, mask=o_b < blocks, other=float("-inf"))
    token = tl.load(p_token + row * blocks + o_b, mask=o_b < blocks, other=vocab)
    choice = tl.min(tl.where(best == tl.max(best, axis=0), token, vocab), axis=0)
    tl.store(p_out + row, tl.where(choice < vocab, choice, 0))


def screened_argmax(
    hidden: torch.Tensor,
    head: ScreenedHead,
    scratch: HeadScratch,
    products: Products,
    out: torch.Tensor,
    launch: Launch = PLAIN,
) -> None:
    """hidden fp16 [R ≤ 16, D] → out int64 [R], the token with the largest logit, the lowest id on a tie."""
    rows, vocab = len(hidden), len(head.rows)
    logits = scratch.logits[: rows * vocab].view(rows, vocab)
    products.store(hidden, head.screen, logits)
    decide(hidden, head.rows, head.error, logits, scratch, out, launch)


def decide(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    error: torch.Tensor,
    logits: torch.Tensor,
    scratch: HeadScratch,
    out: torch.Tensor,
    launch: Launch = PLAIN,
) -> None:
    """hidden [R, D], weight [V, D] and its screen's logits fp32 [R, V] with their error [V] → out int64 [R]."""
    rows, width = hidden.shape
    vocab = len(weight)
    blocks = -(-vocab // TOKENS)
    sizes = {"D": width, "WIDE": triton.next_power_of_2(width), "TOKENS": TOKENS}
    of_blocks, options = {"BLOCKS": triton.next_power_of_2(blocks)}, launch.arguments()
    lower_bound_kernel[(blocks, rows)](
        hidden, logits, error, scratch.low, vocab=vocab, blocks=blocks, num_warps=8, **sizes, **options
    )
    decide_kernel[(blocks, rows)](
        hidden, weight, logits, error, scratch.low, scratch.best, scratch.token,
        vocab=vocab, blocks=blocks, num_warps=8, **sizes, **of_blocks, **options,
    )  # fmt: skip
    pick_kernel[(rows,)](
        scratch.best, scratch.token, out, vocab=vocab, blocks=blocks, num_warps=4, **of_blocks, **options
    )
