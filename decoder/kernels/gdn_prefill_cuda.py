"""The launcher of gdn_prefill.cu: the gated delta rule over the rows of a prompt, in chunks of 64 tokens, on a card."""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from .nvrtc import CudaKernel, kernel

SOURCE = Path(__file__).with_name("gdn_prefill.cu")
CHUNK = 64
CHUNK_THREADS = 128
VALUE_BLOCKS = (64, 48, 32, 16)  # columns of a state that a CTA of the walk may hold, 16 a warp
MAX_DIM = 128  # what a warp's registers hold of keys, and a CTA's shared memory of values

Run = Callable[[str, dict[str, int], ctypes.Structure, int], None]  # kernel, its constants, its arguments, CTAs


class _Arguments(ctypes.Structure):
    """As gdn_prefill.cu's."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "g", "beta", "u", "w", "scores", "decays", "state", "out")
        ),
        ("rows", ctypes.c_int),
    ]


def fits(key_dim: int, value_dim: int) -> bool:
    """Whether gdn_prefill.cu has a form for states of these sizes."""
    return all(dim % 16 == 0 and dim <= MAX_DIM for dim in (key_dim, value_dim))


def delta_rule_cuda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, run: Run | None = None
) -> Tensor:
    """q (scaled) and k fp16 [T, key heads, K], v fp16 [T, H, V], g (log decay) and beta fp32 [T, H] → o fp16 [T, H, V].

    state fp32 [H, K, V] holds all earlier tokens and then holds these too. K and V must fit. run: launches a kernel; on
    the card's current stream unless given.
    """
    heads, _, value_dim = state.shape
    num_rows, key_heads, key_dim = q.shape
    chunks = -(-num_rows // CHUNK)

    def scratch(halves: int) -> Tensor:
        return torch.empty(chunks, heads, halves, dtype=torch.float16, device=q.device)

    u, w, scores = scratch(value_dim * CHUNK), scratch(key_dim * CHUNK), scratch(10 * 256)
    decays = torch.empty(chunks, heads, 2, CHUNK, device=q.device)
    out = torch.empty_like(v)
    tensors = [tensor.contiguous() for tensor in (q, k, v, g, beta)] + [u, w, scores, decays, state, out]
    arguments = _Arguments(*(tensor.data_ptr() for tensor in tensors), num_rows)
    run = run or partial(_launch, q.device)
    stages = 3 if q.is_cuda and _arch(q.device) >= 90 else 2
    walk = definitions(key_heads, heads, key_dim, value_dim, walk=True, stages=stages)
    run(
        "chunk",
        definitions(key_heads, heads, key_dim, value_dim, walk=False, stages=stages),
        arguments,
        chunks * key_heads,
    )
    run("walk", walk, arguments, heads * value_dim // walk["VB"])
    return out


def definitions(key_heads: int, heads: int, key_dim: int, value_dim: int, *, walk: bool, stages: int) -> dict[str, int]:
    """The compile-time constants of one of the two kernels. stages: chunks in the walk's shared memory at a time."""
    value_block = next(block for block in VALUE_BLOCKS if value_dim % block == 0)
    keys, values = CHUNK * (key_dim + 8) * 2, CHUNK * (value_dim + 8) * 2  # staged rows, bytes
    blocks = (6 + 10) * 2 * 512  # of a triangular system and its inverse, two forms each
    gates = heads // key_heads * 2 * CHUNK * 4
    stage = CHUNK * (key_dim + value_block) * 2 + 10 * 512 + 2 * keys + 2 * CHUNK * 4
    shared = stages * stage if walk else keys + values + max(keys, blocks) + 4 * 16 * 20 * 4 + gates
    return {
        "WALK": int(walk),
        "KEY_HEADS": key_heads,
        "H": heads,
        "K": key_dim,
        "V": value_dim,
        "VB": value_block,
        "STAGES": stages,
        "SHARED_BYTES": shared,
    }


def _launch(device: torch.device, name: str, made: dict[str, int], arguments: ctypes.Structure, ctas: int) -> None:
    threads = made["VB"] * 2 + 32 if made["WALK"] else CHUNK_THREADS
    stream = torch.cuda.current_stream(device).cuda_stream
    _kernel(name, tuple(sorted(made.items())), _arch(device)).launch(ctas, threads, arguments, stream, overlap=False)


@cache
def _arch(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@cache
def _kernel(name: str, made: tuple[tuple[str, int], ...], arch: int) -> CudaKernel:
    return kernel(SOURCE, name, arch, dict(made)["SHARED_BYTES"], made)
