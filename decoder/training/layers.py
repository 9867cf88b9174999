"""The layers, over flat tokens: x is [N, hidden], N = sequences * length, so one compiled form serves every length.

Each layer is two pure functions of tensors (compiled on a GPU, shared by all layers of a kind) around the one step
that knows where sequences end: causal attention, or the delta rule's scan. Parameter names are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .delta_rule import CHUNK, ChunkTerms, chunk_outputs, chunk_terms, scan_chunks
from .shape import Shape


@dataclass(frozen=True)
class Tokens:
    """Where flat tokens lie: `sequences` of equal length; position [N]; cos, sin [N, rotary / 2]."""

    sequences: int
    position: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, shape: Shape, sequences: int, length: int, device: torch.device | str, start: int = 0) -> Tokens:
        """`sequences` sequences of positions start … start + length - 1."""
        return cls.at(shape, sequences, torch.arange(start, start + length, device=device).repeat(sequences))

    @classmethod
    def at(cls, shape: Shape, sequences: int, position: Tensor) -> Tokens:
        """Flat tokens of `sequences` sequences at these positions [N]."""
        exponent = torch.arange(0, shape.rotary_dim, 2, device=position.device, dtype=torch.float32) / shape.rotary_dim
        angle = position[:, None].float() * shape.rope_theta**-exponent
        return cls(sequences, position, angle.cos(), angle.sin())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight), in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x W^T in the compute dtype."""
    return F.linear(x.to(dtype), weight.to(dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation of the first dimensions of x [N, heads, d]; the others pass."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def mlp_residual(
    x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float, dt: torch.dtype
) -> Tensor:
    """x + SwiGLU(norm(x))."""
    h = rms_norm(x, norm, eps).to(dt)
    return x + linear(F.silu(linear(h, gate, dt)) * linear(h, up, dt), down, dt).float()


class Mlp(nn.Module):
    """Weights of a SwiGLU MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)


class Norm(nn.Module):
    """Weight of an RMSNorm, stored as its difference from one."""

    def __init__(self, size: int, initial: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), initial))


class FullAttention(nn.Module):
    """Weights of gated full attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        heads, kv_heads, d = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, 2 * heads * d, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_heads * d, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_heads * d, bias=False)
        self.o_proj = nn.Linear(heads * d, shape.hidden_size, bias=False)
        self.q_norm = Norm(d)
        self.k_norm = Norm(d)


class GatedDeltaNet(nn.Module):
    """Weights of a Gated DeltaNet mixer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        heads, channels = shape.linear_value_heads, 2 * shape.key_dim + shape.value_dim
        self.in_proj_qkv = nn.Linear(shape.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, shape.value_dim, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.conv_width, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        step = torch.exp(torch.empty(heads).uniform_(-6.9, -2.3))  # 0.001 to 0.1, as Mamba 2 starts
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = Norm(shape.linear_head_dim, initial=1.0)
        self.out_proj = nn.Linear(shape.value_dim, shape.hidden_size, bias=False)


def attention_inputs(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, q_norm: Tensor,
    k_norm: Tensor, shape: Shape, dt: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, gate [N, heads, d], k, v [N, kv heads, d], after norms and rotation."""
    h, d, eps = rms_norm(x, norm, shape.rms_norm_eps).to(dt), shape.head_dim, shape.rms_norm_eps
    q, gate = linear(h, w_q, dt).view(len(x), -1, 2, d).unbind(-2)
    k, v = linear(h, w_k, dt).view(len(x), -1, d), linear(h, w_v, dt).view(len(x), -1, d)
    q, k = rotate(rms_norm(q, q_norm, eps), cos, sin), rotate(rms_norm(k, k_norm, eps), cos, sin)
    return q.to(dt), gate, k.to(dt), v


def attention_finish(
    x: Tensor, mixed: Tensor, gate: Tensor, w_o: Tensor, norm: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor,
    eps: float, dt: torch.dtype,
) -> Tensor:  # fmt: skip
    """Output gate, projection, residual and MLP. mixed: [N, heads, d]."""
    x = x + linear((mixed * gate.sigmoid()).flatten(1), w_o, dt).float()
    return mlp_residual(x, norm, w_gate, w_up, w_down, eps, dt)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, sequences: int) -> Tensor:
    """Causal attention inside each sequence; q [N, heads, d], k, v [N, kv heads, d] -> [N, heads, d]."""
    q, k, v = (t.view(sequences, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return mixed.transpose(1, 2).flatten(0, 1)


def delta_inputs(
    x: Tensor, position: Tensor, norm: Tensor, w_qkv: Tensor, w_z: Tensor, w_b: Tensor, w_a: Tensor, conv: Tensor,
    a_log: Tensor, dt_bias: Tensor, shape: Shape, dt: torch.dtype,
) -> tuple[ChunkTerms, Tensor]:  # fmt: skip
    """Projections, causal convolution, gates, and all of the delta rule that needs no state; and z [N, value dim]."""
    h = rms_norm(x, norm, shape.rms_norm_eps).to(dt)
    projected = linear(h, w_qkv, dt)
    mixed = projected * conv[:, 0, -1].to(dt)
    for back in range(1, shape.conv_width):
        earlier = F.pad(projected, (0, 0, back, 0))[: len(x)]
        mixed = mixed + torch.where(position[:, None] >= back, earlier, 0.0) * conv[:, 0, -1 - back].to(dt)
    mixed = F.silu(mixed).float()

    def chunked(t: Tensor) -> Tensor:  # [N, heads, ...] -> [chunks, heads, 64, ...]
        return t.view(-1, CHUNK, *t.shape[1:]).transpose(1, 2)

    heads, d = shape.linear_value_heads, shape.linear_head_dim
    repeat = heads // shape.linear_key_heads
    q, k, v = torch.split(mixed, [shape.key_dim, shape.key_dim, shape.value_dim], -1)
    q, k = (t.reshape(len(x), -1, d).repeat_interleave(repeat, 1) for t in (q, k))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    g = -a_log.exp() * F.softplus(linear(h, w_a, dt).float() + dt_bias)
    beta = linear(h, w_b, dt).float().sigmoid()
    v = v.reshape(len(x), heads, d)
    terms = chunk_terms(chunked(q * d**-0.5), chunked(k), chunked(v), chunked(g), chunked(beta))
    return terms, linear(h, w_z, dt)


def delta_finish(
    x: Tensor, queries: Tensor, attention: Tensor, states: Tensor, values: Tensor, z: Tensor, gated_norm: Tensor,
    w_out: Tensor, norm: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, eps: float, dt: torch.dtype,
) -> Tensor:  # fmt: skip
    """Outputs of the rule, gated norm, projection, residual and MLP."""
    out = chunk_outputs(queries, attention, states, values).transpose(1, 2).flatten(0, 1)  # [N, heads, d]
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * gated_norm
    out = out * F.silu(z.float().view(out.shape))
    x = x + linear(out.flatten(1), w_out, dt).float()
    return mlp_residual(x, norm, w_gate, w_up, w_down, eps, dt)


@dataclass
class Kernels:
    """The pure functions of the layers, as they are or compiled; and the dtype of matrix products."""

    dtype: torch.dtype = torch.float32
    attention_inputs: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = attention_inputs
    attention_finish: Callable[..., Tensor] = attention_finish
    delta_inputs: Callable[..., tuple[ChunkTerms, Tensor]] = delta_inputs
    delta_finish: Callable[..., Tensor] = delta_finish

    def compiled(self) -> Kernels:
        """The same functions through torch.compile, for fixed sizes."""

        return Kernels(
            self.dtype,
            torch.compile(attention_inputs, dynamic=False),
            torch.compile(attention_finish, dynamic=False),
            torch.compile(delta_inputs, dynamic=False),
            torch.compile(delta_finish, dynamic=False),
        )


class Layer(nn.Module):
    """One decoder layer: a mixer and an MLP, each behind a norm and with a residual."""

    def __init__(self, shape: Shape, full_attention: bool) -> None:
        super().__init__()
        self.shape = shape
        if full_attention:
            self.self_attn = FullAttention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size)

    def mlp_weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Norm, gate, up, down."""
        mlp = self.mlp
        return self.post_attention_layernorm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight

    def project(self, x: Tensor, tokens: Tokens, kernels: Kernels) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Full attention's q, gate, k, v."""
        a = self.self_attn
        return kernels.attention_inputs(
            x, tokens.cos, tokens.sin, self.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight,
            a.q_norm.weight, a.k_norm.weight, self.shape, kernels.dtype,
        )  # fmt: skip

    def finish_attention(self, x: Tensor, mixed: Tensor, gate: Tensor, kernels: Kernels) -> Tensor:
        """What follows the attention itself."""
        eps = self.shape.rms_norm_eps
        w_o = self.self_attn.o_proj.weight
        return kernels.attention_finish(x, mixed, gate, w_o, *self.mlp_weights(), eps, kernels.dtype)

    def forward(self, x: Tensor, tokens: Tokens, kernels: Kernels) -> Tensor:
        """x: [N, hidden] fp32 -> the same."""
        if hasattr(self, "self_attn"):
            q, gate, k, v = self.project(x, tokens, kernels)
            return self.finish_attention(x, causal_attention(q, k, v, tokens.sequences), gate, kernels)
        return self.recur(x, tokens, kernels)[0]

    def recur(self, x: Tensor, tokens: Tokens, kernels: Kernels) -> tuple[Tensor, ChunkTerms, Tensor, Tensor]:
        """A Gated DeltaNet layer's output [N, hidden], its chunk terms, and each chunk's state before it and values."""
        n = self.linear_attn
        terms, z = kernels.delta_inputs(
            x, tokens.position, self.input_layernorm.weight, n.in_proj_qkv.weight, n.in_proj_z.weight,
            n.in_proj_b.weight, n.in_proj_a.weight, n.conv1d.weight, n.A_log, n.dt_bias, self.shape, kernels.dtype,
        )  # fmt: skip
        states, values = scan_chunks(terms, tokens.sequences)
        out = kernels.delta_finish(
            x, terms.queries, terms.attention, states, values, z, n.norm.weight, n.out_proj.weight,
            *self.mlp_weights(), self.shape.rms_norm_eps, kernels.dtype,
        )  # fmt: skip
        return out, terms, states, values
