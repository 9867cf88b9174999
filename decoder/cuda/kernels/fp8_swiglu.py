"""silu(x gateᵀ)·(x upᵀ) of FP8 activations and weights, in FP8 again, for prompts on sm_90 (fp8_swiglu.cu).

Beside a product of cuBLAS's and a kernel for the rest, 4·N bytes a row are neither written nor read.
"""

from __future__ import annotations

import ctypes
import logging
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from ...errors import DecoderError
from .fp8_rows import Fp8Rows, from_tiles, quantise_rows_naive, rows_in_tiles
from .nvrtc import arch_of, kernel
from .packing import BLOCK

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("fp8_swiglu.cu")
THREADS = 384
CLUSTER = 2  # CTAs that share tiles of w, each with 128 rows of x
STAGES = 4  # column blocks in shared memory
STAGE_BYTES = 3 * BLOCK * BLOCK + 1024  # tiles; scales of 512 bytes in a piece as aligned as they
SHARED_BYTES = STAGES * STAGE_BYTES + 1024  # and barriers
DEFINITIONS = {"STAGES": STAGES}
ARCH = 90
SELF_CHECK_ERROR = 0.02  # sums in another order, which e4m3 rounds otherwise, make 0.005; a wrong tile 0.2 and more


class _Arguments(ctypes.Structure):
    """As fp8_swiglu.cu's."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "x_scale", "w", "w_scale", "out", "out_scale")),
        *((name, ctypes.c_int) for name in ("rows", "row_blocks", "tiles", "column_blocks", "out_rows", "clusters")),
    ]


def fp8_swiglu(
    x: Fp8Rows, weights: torch.Tensor, scales: torch.Tensor, out: Fp8Rows, *, clusters: int | None = None
) -> Fp8Rows:
    """x [T', K], weights e4m3 [2 N, K] (gate, up) in tiles, scales fp32 [2 N/128, K/128] → out [T'', N] in rows.

    What out holds past x.rows stays. clusters: as many as the card runs at once, unless given.
    Twin: fp8_swiglu_naive, which runs on a CPU.
    """
    if not x.values.is_cuda:
        return fp8_swiglu_naive(x, weights, scales, out)
    device = x.values.device
    clusters = clusters or torch.cuda.get_device_properties(device).multi_processor_count // CLUSTER
    launcher = kernel(SOURCE, "fp8_swiglu", ARCH, SHARED_BYTES, tuple(DEFINITIONS.items()))
    stream = torch.cuda.current_stream(device).cuda_stream
    launcher.launch(clusters * CLUSTER, THREADS, arguments_of(x, weights, scales, out, clusters), stream, overlap=False)
    return out


def fp8_swiglu_naive(x: Fp8Rows, weights: torch.Tensor, scales: torch.Tensor, out: Fp8Rows) -> Fp8Rows:
    """Twin, in fp32 up to the result."""
    wide = from_tiles(x.values)[: x.rows].float() * x.scale[: x.rows].repeat_interleave(BLOCK, 1)
    dense = from_tiles(weights).float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    gate, up = (wide @ dense.t()).chunk(2, dim=-1)
    quantised = quantise_rows_naive(F.silu(gate) * up)
    out.values[: x.rows], out.scale[: x.rows] = quantised.values, quantised.scale
    return out


def arguments_of(
    x: Fp8Rows, weights: torch.Tensor, scales: torch.Tensor, out: Fp8Rows, clusters: int
) -> ctypes.Structure:
    """What the kernel is called with; the tensors must outlive it."""
    (rows, width), (out_rows, out_width) = x.values.shape, out.values.shape
    assert x.tiled, "the kernel reads tiles"
    assert not out.tiled, "the kernel writes rows"
    assert weights.shape == (2 * out_width, width), f"{tuple(weights.shape)} for {width} columns to {out_width}"
    assert out_rows >= x.rows, f"room for {out_rows} of {x.rows} rows"
    assert x.scale.stride(0) == out.scale.stride(0) == 1, "the scales of a column block lie apart"
    tensors = (x.values, x.scale, weights, scales, out.values, out.scale)
    sizes = (x.rows, rows // (CLUSTER * BLOCK), out_width // BLOCK, width // BLOCK, out.scale.stride(1), clusters)
    return _Arguments(*(tensor.data_ptr() for tensor in tensors), *sizes)


def runs_fp8_swiglu(device: torch.device) -> bool:
    """Whether this card has the kernel's instructions and computes some rows as the twin does; if not, it is logged."""
    if device.type != "cuda":
        return False
    if arch_of(device) != ARCH:
        log.info("gate, up and SwiGLU run apart: one FP8 kernel for them is there for sm_90 only")
        return False
    try:
        error = _error(device)
    except DecoderError as failure:
        log.warning("gate, up and SwiGLU run apart: %s", failure)
        return False
    if error > SELF_CHECK_ERROR:
        log.warning("gate, up and SwiGLU run apart: one kernel for them is wrong on this card, by %.0f %%", 100 * error)
    return error <= SELF_CHECK_ERROR


def _error(device: torch.device) -> float:
    """Relative, of random rows: more than share a tile of w at a time, several tasks a cluster, gates of all kinds."""
    made = torch.Generator(device).manual_seed(0)
    x = rows_in_tiles(quantise_rows_naive(torch.randn(2100, 640, device=device, generator=made)))
    weights = torch.randn(768, 640, device=device, generator=made).to(torch.float8_e4m3fn)
    scales = (torch.rand(6, 5, device=device, generator=made) + 0.5) / 640**0.5
    scales[2] *= 100  # gates shut and wide open
    found, expected = (Fp8Rows.empty(x.rows, 384, device) for _ in range(2))
    fp8_swiglu(x, weights, scales, found, clusters=2)
    fp8_swiglu_naive(x, weights, scales, expected)
    errors = []
    for tile in range(3):  # each for itself: the last one's values are a hundred times the others'
        one, other = (
            out.values[: x.rows, tile * BLOCK : (tile + 1) * BLOCK].float() * out.scale[: x.rows, tile : tile + 1]
            for out in (found, expected)
        )
        errors.append(float((one - other).norm() / other.norm()))
    return max(errors) if all(map(math.isfinite, errors)) else math.inf
