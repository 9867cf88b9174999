"""FP8 × FP8 products for prefill: activations quantised 128 columns at a time, weights as the checkpoint stores them.

y = Σ_b s_x[t, b] · s_w[n/128, b] · (x8[t, b] · w8[n, b]) over blocks b of 128 columns, summed in fp32. It changes the
arithmetic (activations keep 4 bits of mantissa), so prefill uses it on request only.
"""

from collections.abc import Callable

import torch

from ...errors import DecoderError
from .fp8_rows import ROW_MULTIPLE, Fp8Rows, quantise_rows
from .fp8_swiglu import fp8_swiglu
from .packing import BLOCK, PackedLinear
from .prefill import add_norm, gated_norm, merge_and_gate, swiglu
from .unpack import unpack_into


def fits(packed: PackedLinear) -> bool:
    """Whether these weights can be multiplied in FP8: stored so, every 128×128 block under one scale of its own."""
    return (
        packed.scales is not None
        and packed.n % BLOCK == 0
        and packed.k % (ROW_MULTIPLE * BLOCK) == 0
        and packed.scales.shape == (packed.n // BLOCK, packed.k // BLOCK)
    )


def fp8_product(x: Fp8Rows, weights: torch.Tensor, scales: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T', K], weights e4m3 [N, K], scales fp32 [N/128, K/128] → [T', N]."""
    if x.values.is_cuda:
        return torch._scaled_mm(x.values, weights.t(), x.scale, scales.t(), out_dtype=out_dtype)
    dense = weights.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (x.values.float() * x.scale.repeat_interleave(BLOCK, 1) @ dense.t()).to(out_dtype)


def fp8_linear(x: Fp8Rows, packed: PackedLinear, room: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T', K] → [T, N]; `room` uint8 holds the unpacked weights meanwhile. `packed` must fit."""
    assert packed.scales is not None
    weights = unpack_into(packed, room).view(torch.float8_e4m3fn)
    return fp8_product(x, weights, packed.scales, out_dtype)[: x.rows]


def fp8_mlp_inner(x: Fp8Rows, gate_up: PackedLinear, room: torch.Tensor) -> Fp8Rows:
    """silu(gate)·up of x [T', K], in tiles → [T, N] in rows; `room` as for fp8_linear. gate_up [2 N, K] must fit."""
    assert gate_up.scales is not None
    assert gate_up.interleaved, "not gate and up"
    weights = unpack_into(gate_up, room, tiled=True).view(torch.float8_e4m3fn)
    return fp8_swiglu(x, weights, gate_up.scales, Fp8Rows.empty(x.rows, gate_up.n // 2, x.values.device))


def check_fp8_products(device: torch.device) -> None:
    """Raise DecoderError where this card or this torch has no block-scaled FP8 product."""
    try:
        x = quantise_rows(torch.ones(4, 512, dtype=torch.bfloat16, device=device))
        weights = torch.ones(128, 512, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
        product = fp8_product(x, weights, torch.ones(1, 4, device=device), torch.bfloat16)
        right = bool((product == 512).all())
    except RuntimeError as error:
        raise DecoderError(
            f"no block-scaled FP8 product here: {str(error).splitlines()[0]}",
            "It needs sm_90 and CUDA 12.9 or later; leave out --prefill-dtype fp8.",
        ) from error
    if not right:
        raise DecoderError("the block-scaled FP8 product of ones is wrong here", "leave out --prefill-dtype fp8")


def example_launches(empty: Callable[..., torch.Tensor]) -> None:
    """The kernels at the 27B shapes, for the compile check."""
    bf16, fp32 = torch.bfloat16, torch.float32

    def room(width: int, *, tiled: bool = False) -> Fp8Rows:
        values = empty(256, width, dtype=torch.float8_e4m3fn)
        return Fp8Rows(values, empty(width // BLOCK, 256, dtype=fp32).t(), 64, tiled)

    quantise_rows(empty(64, 10240, dtype=bf16))
    rows = empty(64, 5120, dtype=bf16)
    for wide in (rows, None):
        for tiled in (False, True):
            fp8 = room(5120, tiled=tiled)
            add_norm(empty(64, 5120, dtype=fp32), rows, empty(5120, dtype=bf16), 1e-6, wide=wide, fp8=fp8)
    swiglu(empty(64, 34816, dtype=bf16), room(17408))
    gated_norm(empty(64, 48, 128), empty(64, 6144, dtype=bf16), empty(128, dtype=bf16), 1e-6, room(6144))
    part = (empty(24, 64, 256), empty(24, 64, dtype=fp32))
    merge_and_gate(part, part, empty(64, 14336, dtype=bf16), room(6144))
