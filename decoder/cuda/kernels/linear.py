"""Linear layers at 1..16 rows from streamed FP8 or bf16 weights: the launcher of linear.cu and its plain twin.

y = x Wᵀ with W [N, K] in e4m3 or int8 with one multiplying scale a 128×128 block, or in bf16. The kernel reads every
weight byte once, fuses the RMSNorm before and the SwiGLU, residual addition or argmax after, and gives the same bits
for a row whatever rows ride along.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...errors import DecoderError
from .linear_shape import Epilogue, Shape, Variant, shape_of, slots
from .nvrtc import CudaKernel, arch_of, kernel
from .packing import PackedLinear, unpack

X_SCALE = 1 / 16  # keeps un-normalised activations up to a million inside fp16; a power of two, so exact
MAX_ROWS = 16
SOURCE = Path(__file__).with_name("linear.cu")
_X_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


@dataclass(frozen=True)
class Norm:
    """An RMSNorm before the product: h·rsqrt(Σ h_sumsq / K + eps)·(1 + weight), of which x is h·(1 + weight)·X_SCALE.

    h_sumsq: fp32 [M, K/32], sums of squares of 32 columns of the residual stream h.
    """

    h_sumsq: Tensor
    eps: float


@dataclass(frozen=True)
class Residual:
    """Where a RESIDUAL product goes: stream fp32 [M, N] += y; sumsq fp32 [M, N/32] and x fp16 [M, N] feed the next
    Norm, as it describes them.

    next_norm: bf16 [N], the weight of the norm that follows.
    """

    stream: Tensor
    sumsq: Tensor
    x: Tensor
    next_norm: Tensor


@dataclass(frozen=True)
class Workspace:
    """Scratch shared by a device's linear layers, which run one after the other. All zero between calls."""

    scratch: Tensor
    candidates: Tensor
    counter: Tensor
    processors: int

    @classmethod
    def for_layers(cls, layers: list[PackedLinear], device: torch.device) -> "Workspace":
        """Allocate once for the largest of `layers`."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        parts = max(layer.tiles * slots(layer, processors) for layer in layers) * MAX_ROWS * 128
        return cls(
            torch.zeros(parts, dtype=torch.int64, device=device),
            torch.zeros(processors * MAX_ROWS, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            processors,
        )


def linear_reference(x: Tensor, packed: PackedLinear) -> Tensor:
    """Plain twin: x [M, K] → fp32 [M, N]."""
    return x.float() @ unpack(packed).T


def linear(
    x: Tensor,
    packed: PackedLinear,
    workspace: Workspace,
    *,
    epilogue: Epilogue = Epilogue.STORE,
    out: Tensor | None = None,
    norm: Norm | None = None,
    residual: Residual | None = None,
    overlap: bool = True,
    next_reads_x: bool = False,
) -> Tensor:
    """x [M ≤ 16, K] (fp16, bf16 or fp32; fp16 as Norm describes it with norm) → by epilogue:

    STORE: out [M, N] (fp16, bf16 or fp32; fp16 by default). RESIDUAL: residual's stream, sums of squares and next x.
    SWIGLU: fp16 [M, N/2] = silu(gate)·up of interleaved weights. ARGMAX: int64 [M], the lowest id on a tie.
    Nothing is allocated when out or residual is given. overlap: start while the previous kernel ends (sm_90).
    next_reads_x: the kernel behind reads x before its own wait, so it may start only once x is complete.
    """
    _check(x, packed, norm, epilogue)
    if residual is not None:
        out = residual.x
    elif out is None:
        out = _empty_output(x, packed, epilogue)
    arch = arch_of(x.device)
    variant = Variant(_X_TYPES[x.dtype], norm is not None, epilogue, _X_TYPES.get(out.dtype, 0), next_reads_x)
    shape = shape_of(packed, x.shape[0], workspace.processors, arch)
    _kernel(shape, variant, arch).launch(
        shape.ctas,
        shape.threads,
        _arguments(x, packed, workspace, out, norm, residual),
        torch.cuda.current_stream(x.device).cuda_stream,
        overlap=overlap and arch >= 90,
    )
    return out


def _check(x: Tensor, packed: PackedLinear, norm: Norm | None, epilogue: Epilogue) -> None:
    if not 1 <= x.shape[0] <= MAX_ROWS or x.shape[1] != packed.k or not x.is_contiguous():
        raise DecoderError(f"linear: x {tuple(x.shape)} against K = {packed.k}", "1 to 16 contiguous rows")
    if norm is not None and x.dtype != torch.float16:
        raise DecoderError(f"linear: x of a fused norm is {x.dtype}", "pass fp16, as Norm describes it")
    if (norm is not None and packed.k % 32) or (epilogue == Epilogue.RESIDUAL and packed.n % 32):
        raise DecoderError(f"linear: sums of squares need widths of 32, not {packed.n}×{packed.k}", "use --device cpu")
    if (epilogue == Epilogue.SWIGLU) != packed.interleaved:
        raise DecoderError("linear: SWIGLU goes with interleaved weights", "pack gate and up with interleave=True")


def _empty_output(x: Tensor, packed: PackedLinear, epilogue: Epilogue) -> Tensor:
    if epilogue == Epilogue.ARGMAX:
        return torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    width = packed.n // 2 if epilogue == Epilogue.SWIGLU else packed.n
    return torch.empty(x.shape[0], width, dtype=torch.float16, device=x.device)


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("scale_rows", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_sumsq", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out_sumsq", ctypes.c_void_p),
        ("next_norm", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("candidates", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


def _arguments(
    x: Tensor, packed: PackedLinear, workspace: Workspace, out: Tensor, norm: Norm | None, residual: Residual | None
) -> _Arguments:
    tensors = [packed.weights, packed.scales, packed.scale_rows, x, norm.h_sumsq if norm else None, out]
    tensors += [residual.stream, residual.sumsq, residual.next_norm] if residual else [None, None, None]
    tensors += [workspace.scratch, workspace.candidates, workspace.counter]
    return _Arguments(*(None if t is None else t.data_ptr() for t in tensors), norm.eps if norm else 0.0)


@cache
def _kernel(shape: Shape, variant: Variant, arch: int) -> CudaKernel:
    return kernel(SOURCE, "linear", arch, shape.shared_bytes, tuple(sorted(shape.definitions(variant).items())))
