"""Gated DeltaNet over a whole piece of a prompt: the chunked delta rule in three kernels.

Convolution and key norms; then, for every chunk of 64 tokens on its own, the inverse of its triangular system (forward
substitution, which stays accurate where keys repeat); then one walk over the chunks that carries the state. All three
are CUDA C++ (gdn_conv.cu, gdn_prefill.cu); Triton's form of them is for shapes that those do not take, and for a CPU.
With G the running sum of g inside a chunk and T = (I + tril(β k kᵀ e^(G_i − G_j), −1))⁻¹: u = T(βv), w = T(β e^G k),
v' = u − wS, o = (q e^G)S + tril(q kᵀ e^(G_i − G_j))v', S ← S e^(G_last) + (k e^(G_last − G))ᵀ v'.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gdn_prefill_cuda import CHUNK, HeadShape, conv_cuda, conv_reads, delta_rule_cuda, fits
from .gdn_prepare import conv_naive, conv_rows, unit_rows
from .gdn_verify import delta_rule_naive
from .launch import RING

CONV_ROWS = 32
MOST_ERROR = 1e-2  # fp16 and tf32 leave a third of this at worst
SCAN_VALUE_BLOCK = 32  # columns of the state, a program of the walk
SCAN_STAGES = 2  # with one, some forms of the walk read illegal memory on an H200 (Triton 3.6)


@dataclass(frozen=True, slots=True)
class Form:
    """Kernels that do the same: conv_cuda and delta_rule_cuda describe what they take and give.

    reads: whether `convolve` takes these rows; Triton's takes the others.
    """

    name: str
    reads: Callable[[Tensor], bool]
    convolve: Callable[[Tensor, Tensor, Tensor, int, HeadShape], tuple[Tensor, Tensor, Tensor]]
    delta_rule: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@triton.jit
def conv_kernel(
    p_rows, p_raw, p_weight, p_q, p_k, p_v, start, rows, q_scale,
    STRIDE: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, KEY_HEADS: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, RB: tl.constexpr,
):  # fmt: skip
    """Programs (row block, job): query heads, key heads, value heads."""
    job = tl.program_id(1)
    o_row = tl.program_id(0) * RB + tl.arange(0, RB)
    inside = (o_row < rows)[:, None]
    o_long = o_row[:, None].to(tl.int64)
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
    KEYS: tl.constexpr = KEY_HEADS * K
    if job < KEY_HEADS:
        q = conv_rows(p_rows, p_raw, p_weight, o_row, job * K + o_k, start, False, rows, STRIDE, C, TAPS)
        q = (unit_rows(q) * q_scale).to(p_q.dtype.element_ty)
        tl.store(p_q + (o_long * KEY_HEADS + job) * K + o_k[None, :], q, mask=inside)
    elif job < 2 * KEY_HEADS:
        k = conv_rows(p_rows, p_raw, p_weight, o_row, job * K + o_k, start, False, rows, STRIDE, C, TAPS)
        k = unit_rows(k).to(p_k.dtype.element_ty)
        tl.store(p_k + (o_long * KEY_HEADS + job - KEY_HEADS) * K + o_k[None, :], k, mask=inside)
    else:
        head = job - 2 * KEY_HEADS
        v = conv_rows(p_rows, p_raw, p_weight, o_row, 2 * KEYS + head * V + o_v, start, False, rows, STRIDE, C, TAPS)
        tl.store(p_v + (o_long * H + head) * V + o_v[None, :], v.to(p_v.dtype.element_ty), mask=inside)


@triton.jit
def inverse_by_rows(system, o_n, N: tl.constexpr):
    """(I + A)⁻¹ of a strictly lower triangular A [N, N] by forward substitution."""
    inverse = -system
    for i in range(1, N):
        at = (o_n == i)[:, None]
        line = tl.sum(tl.where(at, inverse, 0.0), axis=0)
        line = line + tl.sum(line[:, None] * inverse, axis=0)
        inverse = tl.where(at, line[None, :], inverse)
    return inverse + tl.where(o_n[:, None] == o_n[None, :], 1.0, 0.0)


@triton.jit
def chunk_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_u, p_w, p_scores, p_sums, rows,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Programs (chunk, value head). Rows beyond the end have k = 0, β = 0 and g = 0: they change nothing."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (H // KEY_HEADS)
    o_n = tl.arange(0, N)
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
    row = (chunk * N + o_n).to(tl.int64)
    inside = row < rows
    sums = tl.cumsum(tl.load(p_g + row * H + head, mask=inside, other=0.0), axis=0)
    beta = tl.load(p_beta + row * H + head, mask=inside, other=0.0)
    p_key = (row * KEY_HEADS + key_head)[:, None] * K + o_k[None, :]
    k = tl.load(p_k + p_key, mask=inside[:, None], other=0.0)
    below = o_n[:, None] > o_n[None, :]
    within = o_n[:, None] >= o_n[None, :]
    fade = tl.exp(tl.where(within, sums[:, None] - sums[None, :], 0.0))
    system = tl.where(below, beta[:, None] * tl.dot(k, tl.trans(k)) * fade, 0.0)
    inverse = inverse_by_rows(system, o_n, N).to(k.dtype)
    out = (chunk * H + head).to(tl.int64) * N
    p_value = (row * H + head)[:, None] * V + o_v[None, :]
    v = tl.load(p_v + p_value, mask=inside[:, None], other=0.0).to(tl.float32) * beta[:, None]
    u = tl.dot(inverse, v.to(k.dtype))
    tl.store(p_u + (out + o_n)[:, None] * V + o_v[None, :], u.to(p_u.dtype.element_ty))
    w = tl.dot(inverse, (k.to(tl.float32) * (beta * tl.exp(sums))[:, None]).to(k.dtype))
    tl.store(p_w + (out + o_n)[:, None] * K + o_k[None, :], w.to(p_w.dtype.element_ty))
    q = tl.load(p_q + p_key, mask=inside[:, None], other=0.0)
    scores = tl.where(within, tl.dot(q, tl.trans(k)) * fade, 0.0)
    tl.store(p_scores + (out + o_n)[:, None] * N + o_n[None, :], scores.to(p_scores.dtype.element_ty))
    tl.store(p_sums + out + o_n, sums)


@triton.jit
def scan_kernel(
    p_q, p_k, p_u, p_w, p_scores, p_sums, p_state, p_out, rows,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, VB: tl.constexpr,
):  # fmt: skip
    """Programs (value block, value head): the walk over the chunks, state [K, VB] in registers."""
    head = tl.program_id(1)
    key_head = head // (H // KEY_HEADS)
    o_n = tl.arange(0, N)
    o_k = tl.arange(0, K)
    o_v = tl.program_id(0) * VB + tl.arange(0, VB)
    p_own_state = p_state + head * K * V + o_k[:, None] * V + o_v[None, :]
    state = tl.load(p_own_state)
    for chunk in range(tl.cdiv(rows, N)):
        part = (chunk * H + head).to(tl.int64) * N
        row = (chunk * N + o_n).to(tl.int64)
        inside = row < rows
        p_key = (row * KEY_HEADS + key_head)[:, None] * K + o_k[None, :]
        q = tl.load(p_q + p_key, mask=inside[:, None], other=0.0)
        k = tl.load(p_k + p_key, mask=inside[:, None], other=0.0)
        w = tl.load(p_w + (part + o_n)[:, None] * K + o_k[None, :])
        u = tl.load(p_u + (part + o_n)[:, None] * V + o_v[None, :])
        scores = tl.load(p_scores + (part + o_n)[:, None] * N + o_n[None, :])
        sums = tl.load(p_sums + part + o_n)
        last = tl.sum(tl.where(o_n == N - 1, sums, 0.0), axis=0)
        narrow = state.to(q.dtype)
        values = u.to(tl.float32) - tl.dot(w, narrow)
        o = tl.dot(q, narrow) * tl.exp(sums)[:, None]
        o = tl.dot(scores, values.to(q.dtype), o)
        faded = (values * tl.exp(last - sums)[:, None]).to(q.dtype)
        state = tl.dot(tl.trans(k), faded, state * tl.exp(last))
        tl.store(
            p_out + (row * H + head)[:, None] * V + o_v[None, :], o.to(p_out.dtype.element_ty), mask=inside[:, None]
        )
    tl.store(p_own_state, state)


def delta_rule_triton(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """As delta_rule_cuda, for any head dimensions that are powers of two from 16 on, also in Triton's interpreter."""
    num_rows, key_heads, key_dim = q.shape
    heads, _, value_dim = state.shape
    chunks = triton.cdiv(num_rows, CHUNK)

    def half(width: int) -> Tensor:
        return torch.empty(chunks, heads, CHUNK, width, dtype=torch.float16, device=q.device)

    u, w, scores, out = half(value_dim), half(key_dim), half(CHUNK), torch.empty_like(v)
    sums = torch.empty(chunks, heads, CHUNK, device=q.device)
    shape = {"KEY_HEADS": key_heads, "H": heads, "K": key_dim, "V": value_dim, "N": CHUNK, "num_warps": 4}
    chunk_kernel[(chunks, heads)](q, k, v, g, beta, u, w, scores, sums, num_rows, num_stages=1, **shape)
    value_block = min(SCAN_VALUE_BLOCK, value_dim)
    scan_kernel[(value_dim // value_block, heads)](
        q, k, u, w, scores, sums, state, out, num_rows, VB=value_block, num_stages=SCAN_STAGES, **shape
    )
    return out


def conv_triton(
    rows: Tensor, raw: Tensor, conv_weight: Tensor, start: int, shape: HeadShape
) -> tuple[Tensor, Tensor, Tensor]:
    """As conv_cuda, for any dtype of the rows and any width of the window."""
    num_rows = len(rows)
    q, k, v = shape.empty(num_rows, rows.device)
    conv_kernel[(triton.cdiv(num_rows, CONV_ROWS), 2 * shape.key_heads + shape.heads)](
        rows, raw, conv_weight, q, k, v, start, num_rows, shape.key_dim**-0.5, STRIDE=rows.stride(0),
        C=conv_weight.shape[0], TAPS=conv_weight.shape[1], KEY_HEADS=shape.key_heads, H=shape.heads, K=shape.key_dim,
        V=shape.value_dim, RB=CONV_ROWS, num_warps=4,
    )  # fmt: skip
    return q, k, v


TRITON = Form("triton", lambda rows: True, conv_triton, delta_rule_triton)
CUDA = Form("cuda", conv_reads, conv_cuda, delta_rule_cuda)


def forms(device: torch.device, key_dim: int, value_dim: int, taps: int) -> list[Form]:
    """The forms that there are for states of these sizes, the fastest first."""
    return [CUDA, TRITON] if device.type == "cuda" and fits(key_dim, value_dim, taps) else [TRITON]


def gdn_prefill(
    rows: Tensor,
    raw: Tensor,
    conv_weight: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    start: int,
    form: Form,
) -> Tensor:
    """rows [T, ≥ C] (q ‖ k ‖ v before the convolution, z may follow) at positions start … → o fp16 [T, H, V].

    g (log decay) and beta fp32 [T, H]; raw [32, C] holds earlier rows by position and stays as it is; state fp32
    [H, K, V] must hold all tokens before `start` and then holds these too.
    """
    heads, key_dim, value_dim = state.shape
    key_heads = (len(conv_weight) - heads * value_dim) // (2 * key_dim)
    convolve = form.convolve if form.reads(rows) else conv_triton
    q, k, v = convolve(rows, raw, conv_weight, start, HeadShape(key_heads, heads, key_dim, value_dim))
    return form.delta_rule(q, k, v, g, beta, state)


def is_right(state_shape: tuple[int, int, int], channels: int, taps: int, device: torch.device, form: Form) -> bool:
    """Whether this card computes the delta rule of these shapes right: 150 random tokens, two pieces, against the twin.

    state_shape: [H, K, V]. A form of the rule has been wrong on a card and right in the interpreter, and nothing
    downstream of a wrong state says so.
    """
    heads, key_dim, value_dim = state_shape
    key_heads = (channels - heads * value_dim) // (2 * key_dim)
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.rand(size, generator=generator).to(device)

    rows = (random(150, channels) * 4 - 2).half()
    conv, g, beta = random(channels, taps) - 0.5, -0.3 * random(150, heads), random(150, heads)
    raw = torch.zeros(RING.value, channels, dtype=torch.float16, device=device)
    state = torch.zeros(state_shape, device=device)
    pieces = [gdn_prefill(rows[:128], raw, conv, g[:128], beta[:128], state, 0, form)]
    raw[torch.arange(96, 128, device=device) % RING.value] = rows[96:128]
    pieces.append(gdn_prefill(rows[128:], raw, conv, g[128:], beta[128:], state, 128, form))
    mixed = conv_naive(rows.new_zeros(taps - 1, channels), rows, conv).float()
    q, k, v = mixed.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim], dim=1)
    q, k = (torch.nn.functional.normalize(x.view(150, key_heads, key_dim), dim=-1) for x in (q, k))
    q, k = (x.repeat_interleave(heads // key_heads, 1) for x in (q, k))
    expected, final = delta_rule_naive(
        q * key_dim**-0.5, k, v.view(150, heads, value_dim), g.exp(), beta, torch.zeros_like(state)
    )
    errors = ((torch.cat(pieces).float() - expected).norm() / expected.norm(), (state - final).norm() / final.norm())
    return all(bool(error < MOST_ERROR) for error in errors)  # NaN is not


def example_launches(empty: Callable[..., Tensor]) -> None:
    """The kernels at the 27B shapes, for the compile check."""
    fp32 = torch.float32
    gdn_prefill(
        empty(8192, 16384, dtype=torch.bfloat16), empty(32, 10240), empty(10240, 4, dtype=fp32),
        empty(8192, 48, dtype=fp32), empty(8192, 48, dtype=fp32), empty(48, 128, 128, dtype=fp32), 0,
        TRITON,
    )  # fmt: skip
