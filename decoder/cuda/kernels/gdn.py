"""A Gated DeltaNet layer between its two projections in one kernel: the launcher of gdn.cu and its plain twin.

The state is committed lazily: a step folds in the rows that the step before it kept, from their stored keys, values
and gates, writes the state once, and runs its own rows without writing it (MODEL section 3).
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...errors import DecoderError
from .gdn_prepare import GdnCache, GdnWeights, conv_naive, gates_naive
from .gdn_verify import delta_rule_naive, gated_norm_naive
from .launch import LENGTH, MAX_ROWS, RING, STATE_LENGTH
from .linear import X_SCALE
from .nvrtc import CudaKernel, arch_of, kernel

SOURCE = Path(__file__).with_name("gdn.cu")
CTA_COLUMNS = 64  # of a head's state on sm_90; the CTAs of a head form a cluster
MAX_KEY_DIM = 128  # a lane convolves four channels of a key head
MAX_VALUE_DIM = 8 * CTA_COLUMNS  # a cluster has at most eight CTAs


def gdn_step_naive(
    rows: Tensor,
    x: Tensor,
    sumsq: Tensor,
    weights: GdnWeights,
    cache: GdnCache,
    eps: float,
    positions: Tensor,
    out: Tensor,
) -> None:
    """Twin of gdn_step. Products of 16 padded rows, all else row by row, so that a row ignores its company."""
    heads, key_dim, value_dim = cache.state.shape
    key_heads, group = cache.k.shape[1], heads // cache.k.shape[1]
    channels, taps = weights.conv.shape
    num_rows, start, length = len(rows), int(positions[STATE_LENGTH.value]), int(positions[LENGTH.value])
    normed = torch.zeros(MAX_ROWS, x.shape[1], device=x.device)
    normed[:num_rows] = x.float() / X_SCALE * torch.rsqrt(sumsq.sum(1, keepdim=True) / x.shape[1] + eps)
    decay, beta = gates_naive(normed, weights.w_b, weights.w_a, weights.a_log, weights.dt_bias)
    slots = torch.arange(length, length + num_rows, device=x.device) % RING.value
    history = torch.zeros(taps - 1, channels, dtype=rows.dtype, device=x.device)
    for back in range(1, min(taps - 1, length) + 1):
        history[-back] = cache.raw[(length - back) % RING.value]
    mixed = conv_naive(history, rows[:, :channels], weights.conv).float()
    q, k, v = mixed.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim], dim=1)
    q, k = (
        wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
        for wide in (part.reshape(num_rows, key_heads, key_dim) for part in (q, k))
    )
    cache.raw[slots], cache.k[slots], cache.v[slots] = rows[:, :channels], k, v.view(num_rows, heads, value_dim)
    cache.decay[slots], cache.beta[slots] = decay[:num_rows], beta[:num_rows]

    def walk(first: int, count: int, state: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        ring = torch.arange(first, first + count, device=x.device) % RING.value
        keys = cache.k[ring].repeat_interleave(group, 1)
        return delta_rule_naive(queries, keys, cache.v[ring], cache.decay[ring], cache.beta[ring], state)

    queries = (q * key_dim**-0.5).repeat_interleave(group, 1)
    if length > start:
        unasked = queries.new_zeros(length - start, heads, key_dim)
        cache.state.copy_(walk(start, length - start, cache.state, unasked)[1])
    o, _ = walk(length, num_rows, cache.state, queries)
    z = rows[:, channels:].reshape(num_rows, heads, value_dim).float()
    out.copy_(gated_norm_naive(o, z, weights.norm, eps).flatten(1))


def gdn_step_fits(key_dim: int, value_dim: int, device: torch.device) -> bool:
    """Whether gdn_step is what a step should use: on a CPU its twin, on a card from sm_90 on (no other has run it)."""
    if device.type == "cuda" and arch_of(device) < 90:
        return False
    return key_dim <= MAX_KEY_DIM and value_dim <= MAX_VALUE_DIM


class _Arguments(ctypes.Structure):
    """As gdn.cu's."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "rows", "x", "sumsq", "w_b", "w_a", "a_log", "dt_bias", "conv", "norm", "state", "raw", "k", "v", "decay",
            "beta", "positions", "out",
        )),
        ("eps", ctypes.c_float),
        ("q_scale", ctypes.c_float),
    ]  # fmt: skip


def gdn_step(
    rows: Tensor,
    x: Tensor,
    sumsq: Tensor,
    weights: GdnWeights,
    cache: GdnCache,
    eps: float,
    positions: Tensor,
    out: Tensor,
    *,
    overlap: bool = False,
    x_is_here: bool = False,
) -> None:
    """rows fp16 [R ≤ 16, C + H·V]: q ‖ k ‖ v before the convolution, then z → out fp16 [R, H·V].

    x fp16 [R, D] and sumsq [R, D/32]: what the rows were projected from, as linear.Norm describes them. Tokens
    STATE_LENGTH … LENGTH − 1 are folded into the cache's state; the new rows fill its rings from position LENGTH on.
    overlap: start while the previous kernel ends (sm_90). x_is_here: x and sumsq are complete when it may start, so
    that the gates need not wait for the projection (products.store with next_reads_x). On a CPU the twin runs.
    """
    if not rows.is_cuda:
        gdn_step_naive(rows, x, sumsq, weights, cache, eps, positions, out)
        return
    _check_types(rows, x, weights)
    arch = arch_of(rows.device)
    columns = CTA_COLUMNS if arch >= 90 else cache.state.shape[2]  # clusters came with sm_90
    made = definitions(len(rows), rows.stride(0), x.shape[1], weights, cache, columns)
    made["GATES_EARLY"] = int(x_is_here)
    arguments = arguments_of(rows, x, sumsq, weights, cache, eps, positions, out)
    ctas, threads = made["H"] * made["SPLIT"], made["V"] // made["SPLIT"] * 4
    stream = torch.cuda.current_stream(rows.device).cuda_stream
    _kernel(tuple(sorted(made.items())), arch).launch(ctas, threads, arguments, stream, overlap=overlap and arch >= 90)


def _check_types(rows: Tensor, x: Tensor, weights: GdnWeights) -> None:
    expected = torch.float16, torch.float16, torch.bfloat16, torch.bfloat16, torch.bfloat16
    found = rows.dtype, x.dtype, weights.w_b.dtype, weights.w_a.dtype, weights.norm.dtype
    if found != expected:
        raise DecoderError(
            f"gdn_step: rows, x, w_b, w_a and norm are {found}, expected {expected}",
            "convert them when they are loaded",
        )


def definitions(
    num_rows: int, stride: int, width: int, weights: GdnWeights, cache: GdnCache, columns: int
) -> dict[str, int]:
    """The compile-time constants of gdn.cu, a CTA holding at most `columns` columns of a head's state."""
    heads, key_dim, value_dim = cache.state.shape
    taps, columns = weights.conv.shape[1], min(columns, value_dim)
    inputs = 2 * key_dim + columns
    batch = max(4, num_rows)
    floats = (batch + num_rows) * key_dim + taps * inputs + batch * columns + num_rows * (2 + 3 * value_dim // 8)
    halves = (taps - 1 + num_rows) * inputs + num_rows * columns
    return {
        "M": num_rows,
        "H": heads,
        "KEY_HEADS": cache.k.shape[1],
        "K": key_dim,
        "V": value_dim,
        "SPLIT": -(-value_dim // columns),
        "D": width,
        "TAPS": taps,
        "STRIDE": stride,
        "GATES_EARLY": 0,
        "NEXT_STARTS": 1,
        "SHARED_BYTES": 4 * floats + 2 * halves + 128,
    }


def arguments_of(
    rows: Tensor,
    x: Tensor,
    sumsq: Tensor,
    weights: GdnWeights,
    cache: GdnCache,
    eps: float,
    positions: Tensor,
    out: Tensor,
) -> ctypes.Structure:
    """What the kernel is called with; the tensors must outlive it."""
    tensors = (
        rows, x, sumsq, weights.w_b, weights.w_a, weights.a_log, weights.dt_bias, weights.conv, weights.norm,
        cache.state, cache.raw, cache.k, cache.v, cache.decay, cache.beta, positions, out,
    )  # fmt: skip
    return _Arguments(*(tensor.data_ptr() for tensor in tensors), eps, cache.state.shape[1] ** -0.5)


@cache
def _kernel(made: tuple[tuple[str, int], ...], arch: int) -> CudaKernel:
    return kernel(SOURCE, "gdn", arch, dict(made)["SHARED_BYTES"], made)
