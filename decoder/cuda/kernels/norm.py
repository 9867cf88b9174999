"""RMSNorm with the (1 + w) weight: x·rsqrt(mean x² + eps)·(1 + w) in fp32, cast at the end."""

import torch
import triton
import triton.language as tl

from .launch import LENGTH, MTP_LENGTH, PLAIN, RING, Launch, enter


def rms_norm_naive(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Twin: x [R, D], weight [D] → [R, D] in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1 + weight.float())).to(x.dtype)


@triton.jit
def normalised(x, p_weight, o_d, eps, D: tl.constexpr):
    """One fp32 row, zero beyond D → its norm times (1 + w), still fp32."""
    weight = tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    return x * scale * (1.0 + weight)


@triton.jit
def rms_norm_kernel(
    p_x, p_weight, p_out, p_ring, p_positions, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, TO_RING: tl.constexpr, LAST_PENDING: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program r: row r, or with LAST_PENDING the row of the newest position MTP has not seen."""
    row = tl.program_id(0)
    o_d = tl.arange(0, BLOCK)
    enter(PDL)
    source = row
    if LAST_PENDING:
        source = tl.load(p_positions + LENGTH) - tl.load(p_positions + MTP_LENGTH) - 1
        source = tl.maximum(source, 0)  # nothing is pending while a graph is recorded before the first prompt
    x = tl.load(p_x + source * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    y = normalised(x, p_weight, o_d, eps, D).to(p_out.dtype.element_ty)
    tl.store(p_out + row * D + o_d, y, mask=o_d < D)
    if TO_RING:
        slot = (tl.load(p_positions + LENGTH) + row) % RING
        tl.store(p_ring + slot * D + o_d, y, mask=o_d < D)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    ring: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    last_pending: bool = False,
    launch: Launch = PLAIN,
) -> None:
    """x [R, D] → out [R, D].

    ring [32, D]: also written there by position (LENGTH + row). last_pending: only the row LENGTH − MTP_LENGTH − 1,
    into out [1, D].
    """
    width = x.shape[1]
    rms_norm_kernel[(out.shape[0],)](
        x, weight, out, out if ring is None else ring, x if positions is None else positions,
        eps=eps, D=width, BLOCK=triton.next_power_of_2(width), TO_RING=ring is not None,
        LAST_PENDING=last_pending, num_warps=8, **launch.arguments(),
    )  # fmt: skip
