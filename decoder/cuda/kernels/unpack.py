"""Packed weights back into a dense matrix, one at a time, for the products of prefill (unpack.cu)."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from ...errors import DecoderError
from .fp8_rows import to_tiles
from .nvrtc import CudaKernel, arch_of, kernel
from .packing import BLOCK, PackedLinear, unpack

SOURCE = Path(__file__).with_name("unpack.cu")
THREADS = 256
_OUT_TILES = 3
_OUT = {torch.uint8: 0, torch.bfloat16: 1, torch.float32: 2}


class _Arguments(ctypes.Structure):
    """As unpack.cu's."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "scale_rows", "out")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "chunks")),
    ]


def unpack_into(packed: PackedLinear, out: torch.Tensor, *, tiled: bool = False) -> torch.Tensor:
    """The dense weights [N, K] of a packed layer, written over the start of `out`; gate rows come before up rows.

    out: bf16 or fp32, or uint8 for the e4m3 bytes of FP8 weights as they are, without their scales, then perhaps
    in tiles (fp8_rows.py; N and K multiples of 128). On a CPU the twin (packing.unpack) runs.
    """
    dense = out.view(-1)[: packed.n * packed.k].view(packed.n, packed.k)
    if not out.is_cuda:
        rows = unpack_bytes(packed) if out.dtype == torch.uint8 else unpack(packed)
        dense.copy_(to_tiles(rows) if tiled else rows)
        return dense
    arch = arch_of(out.device)
    made = tuple(sorted(definitions(packed, out.dtype, tiled=tiled).items()))
    stream = torch.cuda.current_stream(out.device).cuda_stream
    _kernel(made, arch).launch(
        packed.tiles * packed.chunks, THREADS, arguments_of(packed, dense), stream, overlap=False
    )  # fmt: skip
    return dense


def unpack_bytes(packed: PackedLinear) -> torch.Tensor:
    """Twin: the e4m3 bytes uint8 [N, K] of FP8 weights."""
    assert packed.scales is not None, "bf16 weights have no e4m3 bytes"
    unscaled = replace(packed, scales=torch.ones_like(packed.scales))
    return unpack(unscaled).to(torch.float8_e4m3fn).view(torch.uint8)


def definitions(packed: PackedLinear, out_dtype: torch.dtype, *, tiled: bool = False) -> dict[str, int]:
    """The compile-time constants of unpack.cu. Raises DecoderError where it cannot write these weights as asked."""
    if out_dtype not in _OUT or packed.is_int8 or (out_dtype == torch.uint8 and not packed.is_fp8):
        kind = "int8" if packed.is_int8 else "FP8" if packed.is_fp8 else "bf16"
        raise DecoderError(f"unpack.cu does not write {kind} weights as {out_dtype}", "ask for bf16 or fp32")
    if tiled and (out_dtype != torch.uint8 or packed.n % BLOCK or packed.k % BLOCK):
        raise DecoderError(
            f"unpack.cu does not write {packed.n} x {packed.k} weights as {out_dtype} in tiles", "ask for rows"
        )
    written = _OUT_TILES if tiled else _OUT[out_dtype]
    return {"FP8": int(packed.is_fp8), "OUT": written, "INTERLEAVED": int(packed.interleaved)}


def arguments_of(packed: PackedLinear, dense: torch.Tensor) -> ctypes.Structure:
    """What the kernel is called with; the tensors must outlive it."""
    tensors = (packed.weights, packed.scales, packed.scale_rows, dense)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    return _Arguments(*addresses, packed.n, packed.k, packed.chunks)


@cache
def _kernel(made: tuple[tuple[str, int], ...], arch: int) -> CudaKernel:
    return kernel(SOURCE, "unpack", arch, 0, made)
