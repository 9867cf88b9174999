"""The launchers of gdn_conv.cu and gdn_prefill.cu: a Gated DeltaNet layer over many rows of a prompt, on a card."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from ...errors import DecoderError
from .nvrtc import CudaKernel, arch_of, kernel

CONV_SOURCE = Path(__file__).with_name("gdn_conv.cu")
CONV_COLUMNS = 1024
CONV_TAPS = 4
SOURCE = Path(__file__).with_name("gdn_prefill.cu")
CHUNK = 64  # also the rows of a CTA of the convolution
THREADS = 128  # of a CTA, but of the walk's
VALUE_BLOCKS = (64, 48, 32, 16)  # columns of a state that a CTA of the walk may hold, 16 a warp
MAX_DIM = 128  # what a warp's registers hold of keys, and a CTA's shared memory of values

Run = Callable[[Path, str, dict[str, int], ctypes.Structure, int], None]  # source, kernel, constants, arguments, CTAs


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of a Gated DeltaNet layer and their dimensions."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    def empty(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """fp16 (q, k, v) of so many rows."""
        keys, values = (rows, self.key_heads, self.key_dim), (rows, self.heads, self.value_dim)
        q, k, v = (torch.empty(size, dtype=torch.float16, device=device) for size in (keys, keys, values))
        return q, k, v


class _ConvArguments(ctypes.Structure):
    """As gdn_conv.cu's."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "raw", "conv", "q", "k", "v")),
        ("q_scale", ctypes.c_float),
        ("start", ctypes.c_int),
        ("count", ctypes.c_int),
    ]


class _Arguments(ctypes.Structure):
    """As gdn_prefill.cu's."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "g", "beta", "u", "w", "scores", "decays", "state", "out")
        ),
        ("rows", ctypes.c_int),
    ]


def fits(key_dim: int, value_dim: int, taps: int) -> bool:
    """Whether there are forms for states of these sizes and a convolution of so many taps."""
    return key_dim in (16, 32, 64, 128) and value_dim % 16 == 0 and value_dim <= MAX_DIM and taps == CONV_TAPS


def conv_reads(rows: Tensor) -> bool:
    """Whether conv_cuda can read these rows: 16 bits an element, rows that start at 16 bytes."""
    aligned = rows.stride(1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0
    return rows.dtype in (torch.bfloat16, torch.float16) and aligned


def conv_cuda(
    rows: Tensor, raw: Tensor, conv_weight: Tensor, start: int, shape: HeadShape, *, run: Run | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """rows bf16 or fp16 [T, ≥ C] at positions start … → fp16 (q, k, v) [T, key heads, K], …, [T, H, V].

    Convolution and silu; q and k of unit length, q then times K^-0.5; they lie as delta_rule_cuda wants them. raw fp16
    [32, C]: earlier rows by position; conv_weight fp32 [C, 4]. run: as delta_rule_cuda's.
    """
    if not conv_reads(rows):
        raise DecoderError(
            f"conv_cuda: rows are {rows.dtype} with strides {rows.stride()}, expected 16 bits, 1 and a multiple of 8",
            "this is a fault of the decoder: please report it",
        )
    q, k = (_rows_of(_padded(len(rows), shape.key_heads, shape.key_dim, rows.device), len(rows)) for _ in range(2))
    v = torch.empty(len(rows), shape.heads, shape.value_dim, dtype=torch.float16, device=rows.device)
    tensors = rows, raw, conv_weight.contiguous(), q, k, v
    addresses = (tensor.data_ptr() for tensor in tensors)
    arguments = _ConvArguments(*addresses, shape.key_dim**-0.5, start, len(rows))
    blocks = -(-len(conv_weight) // CONV_COLUMNS) * -(-len(rows) // CHUNK)
    made = conv_definitions(shape, rows.stride(0), rows.dtype)
    (run or partial(_launch, rows.device))(CONV_SOURCE, "convolve", made, arguments, blocks)
    return q, k, v


def conv_definitions(shape: HeadShape, stride: int, dtype: torch.dtype) -> dict[str, int]:
    """The compile-time constants of gdn_conv.cu."""
    heads = {"KEY_HEADS": shape.key_heads, "H": shape.heads, "K": shape.key_dim, "V": shape.value_dim}
    return {**heads, "STRIDE": stride, "BF16": int(dtype == torch.bfloat16), "THREADS": THREADS, "SHARED_BYTES": 0}


def _padded(rows: int, heads: int, width: int, device: torch.device) -> Tensor:
    """fp16 [heads, room, width + 8], room 64·n: as gdn_prefill.cu reads q and k, which wants zeros past the rows."""
    return torch.empty(heads, -(-rows // CHUNK) * CHUNK, width + 8, dtype=torch.float16, device=device)


def _rows_of(padded: Tensor, rows: int) -> Tensor:
    """[rows, heads, width], the same memory."""
    return padded.permute(1, 0, 2)[:rows, :, :-8]


def _as_padded(x: Tensor) -> Tensor:
    """x [rows, heads, width] itself where conv_cuda made it, else a copy that lies as that does."""
    rows, heads, width = x.shape
    if x.stride() == (width + 8, -(-rows // CHUNK) * CHUNK * (width + 8), 1):
        return x
    padded = _padded(rows, heads, width, x.device).zero_()
    return _rows_of(padded, rows).copy_(x)


def delta_rule_cuda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, run: Run | None = None,
    arch: int | None = None,
) -> Tensor:  # fmt: skip
    """q (scaled) and k fp16 [T, key heads, K], v fp16 [T, H, V], g (log decay) and beta fp32 [T, H] → o fp16 [T, H, V].

    state fp32 [H, K, V] holds all earlier tokens and then holds these too. K and V must fit. run: launches a kernel, on
    the card's current stream unless given; arch: what for, 80 or 90.
    """
    num_rows, key_heads, key_dim = q.shape
    heads, _, value_dim = state.shape
    shape = HeadShape(key_heads, heads, key_dim, value_dim)
    chunks = -(-num_rows // CHUNK)

    def scratch(halves: int) -> Tensor:
        return torch.empty(chunks, heads, halves, dtype=torch.float16, device=q.device)

    u, w, scores = scratch(value_dim * CHUNK), scratch(key_dim * CHUNK), scratch(10 * 256)
    decays = torch.empty(chunks, heads, 2, CHUNK, device=q.device)
    out = torch.empty(num_rows, heads, value_dim, dtype=v.dtype, device=v.device)
    inputs = _as_padded(q), _as_padded(k), v.contiguous(), g.contiguous(), beta.contiguous()
    tensors = *inputs, u, w, scores, decays, state, out
    arguments = _Arguments(*(tensor.data_ptr() for tensor in tensors), num_rows)
    run = run or partial(_launch, q.device)
    arch = arch or arch_of(q.device)
    chunk, walk = (definitions(shape, walk=walk, arch=arch) for walk in (False, True))
    run(SOURCE, "chunk", chunk, arguments, chunks * key_heads)
    run(SOURCE, "walk", walk, arguments, heads * value_dim // walk["VB"])
    return out


def definitions(shape: HeadShape, *, walk: bool, arch: int) -> dict[str, int]:
    """The compile-time constants of one of the two kernels for sm_80 or sm_90."""
    stages = 3 if arch >= 90 else 2  # chunks in the walk's shared memory
    key_dim, value_dim, group = shape.key_dim, shape.value_dim, shape.heads // shape.key_heads
    value_block = next(block for block in VALUE_BLOCKS if value_dim % block == 0)
    keys, values = CHUNK * (key_dim + 8) * 2, CHUNK * (value_dim + 8) * 2  # staged rows, bytes
    blocks = (6 + 10) * 2 * 512  # of a triangular system and its inverse, two forms each
    gates = group * 2 * CHUNK * 4
    stage = CHUNK * (key_dim + value_block) * 2 + 10 * 512 + 2 * keys + 2 * CHUNK * 4
    shared = stages * (stage + 16) if walk else keys + values + max(keys, blocks) + 4 * 16 * 20 * 4 + gates
    return {
        "WALK": int(walk),
        "KEY_HEADS": shape.key_heads,
        "H": shape.heads,
        "K": key_dim,
        "V": value_dim,
        "VB": value_block,
        "STAGES": stages,
        "BULK": int(arch >= 90),
        "THREADS": value_block * 2 + 32 if walk else THREADS,
        "SHARED_BYTES": shared,
    }


def _launch(
    device: torch.device, source: Path, name: str, made: dict[str, int], arguments: ctypes.Structure, ctas: int
) -> None:
    stream = torch.cuda.current_stream(device).cuda_stream
    launcher = _kernel(source, name, tuple(sorted(made.items())), arch_of(device))
    launcher.launch(ctas, made["THREADS"], arguments, stream, overlap=False)


@cache
def _kernel(source: Path, name: str, made: tuple[tuple[str, int], ...], arch: int) -> CudaKernel:
    return kernel(source, name, arch, dict(made)["SHARED_BYTES"], made)
