"""Embedding lookups driven by tokens on the device: the verify rows, and the input of the MTP head."""

import torch
import triton
import triton.language as tl

from .launch import LENGTH, MTP_LENGTH, PLAIN, RING, Launch, enter
from .linear import X_SCALE, Residual
from .norm import normalised, rms_norm_naive

GROUP = tl.constexpr(32)  # columns a sum of squares covers, as linear.Norm reads them
SCALE = tl.constexpr(X_SCALE)


@triton.jit
def drafted_token(p_draft, p_draft_ids, HAS_IDS: tl.constexpr):
    """The token of a row of the draft head."""
    token = tl.load(p_draft).to(tl.int64)
    if HAS_IDS:
        token = tl.load(p_draft_ids + token)
    return token


@triton.jit(do_not_specialize=["rows"])  # one binary for every row count, so that a row never depends on it
def embed_rows_kernel(
    p_tokens, p_last_draft, p_draft_ids, p_positions, p_embedding, p_norm, p_stream, p_sumsq, p_x, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_DRAFT: tl.constexpr, HAS_IDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program r: the embedding of the token at LENGTH + r; the last draft is also put into the token ring."""
    row = tl.program_id(0)
    o_d = tl.arange(0, BLOCK)
    enter(PDL)
    slot = (tl.load(p_positions + LENGTH) + row) % RING
    if HAS_DRAFT and row == rows - 1:
        token = drafted_token(p_last_draft, p_draft_ids, HAS_IDS)
        tl.store(p_tokens + slot, token)
    else:
        token = tl.load(p_tokens + slot)
    x = tl.load(p_embedding + token * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    tl.store(p_stream + row * D + o_d, x, mask=o_d < D)
    gain = 1.0 + tl.load(p_norm + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    tl.store(p_x + row * D + o_d, (x * gain * SCALE).to(p_x.dtype.element_ty), mask=o_d < D)
    o_group = tl.arange(0, BLOCK // GROUP)
    sums = tl.sum(tl.reshape(x * x, [BLOCK // GROUP, GROUP]), axis=1)
    tl.store(p_sumsq + row * (D // GROUP) + o_group, sums, mask=o_group < D // GROUP)


def embed_rows(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    residual: Residual,
    *,
    last_draft: torch.Tensor | None = None,
    draft_ids: torch.Tensor | None = None,
    launch: Launch = PLAIN,
) -> None:
    """residual = embedding of the R tokens at positions LENGTH …, as linear's RESIDUAL epilogue would have left it.

    tokens int64 [32] by position; last_draft int64 [1] is the token of the last row, not yet in `tokens`; with
    draft_ids int64 [V'] it is the place of that token there.
    """
    rows, width = residual.stream.shape
    embed_rows_kernel[(rows,)](
        tokens, tokens if last_draft is None else last_draft, tokens if draft_ids is None else draft_ids, positions,
        embedding, residual.next_norm, residual.stream, residual.sumsq, residual.x, rows=rows, D=width,
        BLOCK=triton.next_power_of_2(width), HAS_DRAFT=last_draft is not None, HAS_IDS=draft_ids is not None,
        num_warps=4, **launch.arguments(),
    )  # fmt: skip


def mtp_input_naive(
    embedded: torch.Tensor, hidden: torch.Tensor, norm_e: torch.Tensor, norm_h: torch.Tensor, eps: float
) -> torch.Tensor:
    """Twin: embedded, hidden [R, D] → fp32 [R, 2D], embedding first."""
    return torch.cat(
        [rms_norm_naive(embedded.float(), norm_e, eps), rms_norm_naive(hidden.float(), norm_h, eps)], dim=-1
    )


@triton.jit
def mtp_input_kernel(
    p_tokens, p_draft, p_draft_ids, p_positions, p_embedding, p_hidden, p_norm_e, p_norm_h, p_out, p_residual, eps,
    DRAFT: tl.constexpr, HAS_IDS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (r, half): half 0 embeds the following token, half 1 takes the hidden state; each is normed."""
    program = tl.program_id(0)
    row = program // 2
    half = program % 2
    o_d = tl.arange(0, BLOCK)
    enter(PDL)
    if DRAFT > 0:  # the head's own recursion: one row, behind DRAFT drafts
        position = tl.load(p_positions + LENGTH) + (DRAFT - 1)
        o_hidden = 0
    else:
        position = tl.load(p_positions + MTP_LENGTH) + row
        o_hidden = (position % RING) * D
    if half == 0:
        slot = (position + 1) % RING
        if DRAFT > 0:
            token = drafted_token(p_draft, p_draft_ids, HAS_IDS)
            tl.store(p_tokens + slot, token)
        else:
            token = tl.load(p_tokens + slot)
        x = tl.load(p_embedding + token * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        y = normalised(x, p_norm_e, o_d, eps, D)
        tl.store(p_residual + row * D + o_d, tl.zeros_like(x), mask=o_d < D)
    else:
        x = tl.load(p_hidden + o_hidden + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        y = normalised(x, p_norm_h, o_d, eps, D)
    tl.store(p_out + row * 2 * D + half * D + o_d, y.to(p_out.dtype.element_ty), mask=o_d < D)


def mtp_input(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    norm_e: torch.Tensor,
    norm_h: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual: torch.Tensor,
    *,
    draft: torch.Tensor | None = None,
    draft_ids: torch.Tensor | None = None,
    draft_index: int = 0,
    launch: Launch = PLAIN,
) -> None:
    """out [R, 2D] for the MTP head's `fc`; residual fp32 [R, D], to which its product is added, is zeroed.

    draft_index 0: row r is position MTP_LENGTH + r with `hidden` [32, D] a ring of the target's final hidden states.
    draft_index i ≥ 1: one row at position LENGTH + i − 1, `draft` int64 [1] the i-th draft (its place in
    draft_ids int64 [V'] where given) and `hidden` [1, D] the head's own last output.
    """
    rows, width = out.shape[0], out.shape[1] // 2
    mtp_input_kernel[(2 * rows,)](
        tokens, tokens if draft is None else draft, tokens if draft_ids is None else draft_ids, positions, embedding,
        hidden, norm_e, norm_h, out, residual, eps=eps, DRAFT=draft_index, HAS_IDS=draft_ids is not None,
        D=width, BLOCK=triton.next_power_of_2(width), num_warps=8, **launch.arguments(),
    )  # fmt: skip
