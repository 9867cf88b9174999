"""Greedy continuations of many prompts at once, on the training model's own weights.

The prompt is read in one pass through the training layers; then every step advances all sequences by a token, from
fixed buffers, so that on a GPU the step is one CUDA graph that later calls replay with the weights of that time.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import Kernels, Layer, Tokens, causal_attention, linear, mlp_residual, rms_norm
from .layers import attention_inputs as project_attention
from .model import TrainingModel


class Rollout:
    """`batch` prompts of `length` tokens (a multiple of 64) and room for `new_tokens` more."""

    def __init__(self, model: TrainingModel, batch: int, length: int, new_tokens: int) -> None:
        self.model, self.shape, self.batch, self.length = model, model.shape, batch, length
        self.kernels = Kernels(model.kernels.dtype)
        device, s = model.lm_head.weight.device, model.shape
        channels = 2 * s.key_dim + s.value_dim
        self.ids = torch.zeros(batch, length + new_tokens, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.conv = torch.zeros(s.num_layers, batch, s.conv_width, channels, device=device)
        state = (s.num_layers, batch, s.linear_value_heads, s.linear_head_dim, s.linear_head_dim)
        self.state = torch.zeros(state, device=device)
        self.places = -(-(length + new_tokens) // 64) * 64  # attention kernels like a whole number of tiles
        cache = (batch, s.num_key_value_heads, self.places, s.head_dim)
        full = [n for n in range(s.num_layers) if s.is_full_attention(n)]
        self.keys = {n: torch.zeros(cache, device=device, dtype=self.kernels.dtype) for n in full}
        self.values = {n: torch.zeros_like(k) for n, k in self.keys.items()}
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def run(self, prompts: Tensor, prefill_tokens: int = 1 << 18) -> Tensor:
        """[batch, length] prompts -> [batch, length + new_tokens] ids, in a buffer that the next call reuses."""
        rows = max(1, prefill_tokens // self.length)
        for first in range(0, self.batch, rows):
            self._prefill(prompts[first : first + rows], first)
        self.ids[:, : self.length] = prompts
        self.position.fill_(self.length)
        steps = self.ids.shape[1] - self.length - 1
        if self.ids.is_cuda and self.graph is None and steps > 0:
            self._step()  # the warm-up that a capture needs, and the first step
            steps -= 1
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # records, does not run
                self._step()
        for _ in range(steps):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step()
        return self.ids

    def _emit(self, x: Tensor) -> Tensor:
        hidden = rms_norm(x, self.model.model.norm.weight, self.shape.rms_norm_eps)
        return self.model.logits(hidden.to(self.kernels.dtype)).argmax(-1)

    def _prefill(self, prompts: Tensor, first: int) -> None:
        """Reads prompts into rows first … of the buffers, and writes the first new token of each."""
        count, length = prompts.shape
        rows = slice(first, first + count)
        tokens = Tokens.of(self.shape, count, length, prompts.device)
        x = self.model.model.embed_tokens(prompts.flatten()).float()
        for n, module in enumerate(self.model.model.layers):
            layer = cast(Layer, module)
            if n in self.keys:
                q, gate, k, v = layer.project(x, tokens, self.kernels)
                for cache, new in ((self.keys[n], k), (self.values[n], v)):
                    cache[rows, :, :length] = new.view(count, length, *new.shape[1:]).transpose(1, 2)
                x = layer.finish_attention(x, causal_attention(q, k, v, count), gate, self.kernels)
            else:
                before = x.view(count, length, -1)[:, 1 - self.shape.conv_width :]
                h = rms_norm(before, layer.input_layernorm.weight, self.shape.rms_norm_eps)
                self.conv[n, rows, 1:] = linear(h, layer.linear_attn.in_proj_qkv.weight, self.kernels.dtype).float()
                x, terms, states, values = layer.recur(x, tokens, self.kernels)
                keys, decay, states, values = (
                    t.view(count, -1, *t.shape[1:])[:, -1] for t in (terms.keys, terms.decay, states, values)
                )
                self.state[n, rows] = decay[..., None, None] * states + keys.transpose(-1, -2) @ values
        self.ids[rows, length] = self._emit(x.view(count, length, -1)[:, -1])

    @torch.no_grad()
    def _step(self) -> None:
        """Reads the token at `position` of every sequence and writes the one after it."""
        tokens = Tokens.at(self.shape, self.batch, self.position.expand(self.batch))
        x = self.model.model.embed_tokens(self.ids.index_select(1, self.position)[:, 0]).float()
        for n, module in enumerate(self.model.model.layers):
            layer = cast(Layer, module)
            x = self._attend(n, layer, x, tokens) if n in self.keys else self._recur(n, layer, x)
            x = mlp_residual(x, *layer.mlp_weights(), self.shape.rms_norm_eps, self.kernels.dtype)
        self.ids.index_copy_(1, self.position + 1, self._emit(x)[:, None])
        self.position += 1

    def _attend(self, n: int, layer: Layer, x: Tensor, tokens: Tokens) -> Tensor:
        a, s = layer.self_attn, self.shape
        q, gate, k, v = project_attention(
            x, tokens.cos, tokens.sin, layer.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight,
            a.v_proj.weight, a.q_norm.weight, a.k_norm.weight, s, self.kernels.dtype,
        )  # fmt: skip
        self.keys[n].index_copy_(2, self.position, k[:, :, None])
        self.values[n].index_copy_(2, self.position, v[:, :, None])
        seen = torch.arange(self.places, device=x.device)[None] <= self.position  # [1, time]
        grouped = q.view(self.batch, s.num_key_value_heads, -1, s.head_dim)  # the heads of a group, as rows
        mixed = F.scaled_dot_product_attention(grouped, self.keys[n], self.values[n], attn_mask=seen)
        mixed = mixed.reshape(self.batch, -1, s.head_dim)
        return x + linear((mixed * gate.sigmoid()).flatten(1), a.o_proj.weight, self.kernels.dtype).float()

    def _recur(self, n: int, layer: Layer, x: Tensor) -> Tensor:
        m, s, dt = layer.linear_attn, self.shape, self.kernels.dtype
        h = rms_norm(x, layer.input_layernorm.weight, s.rms_norm_eps).to(dt)
        self.conv[n, :, :-1] = self.conv[n, :, 1:].clone()
        self.conv[n, :, -1] = linear(h, m.in_proj_qkv.weight, dt).float()
        mixed = F.silu((self.conv[n] * m.conv1d.weight[:, 0].T).sum(1))
        q, k, v = torch.split(mixed, [s.key_dim, s.key_dim, s.value_dim], -1)
        repeat = s.linear_value_heads // s.linear_key_heads
        q, k = (t.view(self.batch, -1, s.linear_head_dim).repeat_interleave(repeat, 1) for t in (q, k))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        v = v.view(self.batch, -1, s.linear_head_dim)
        g = -m.A_log.exp() * F.softplus(linear(h, m.in_proj_a.weight, dt).float() + m.dt_bias)
        state = self.state[n].mul_(g.exp()[..., None, None])
        beta = linear(h, m.in_proj_b.weight, dt).float().sigmoid()
        delta = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
        state.addcmul_(k[..., None], delta[..., None, :])
        out = (q[..., None, :] @ state)[..., 0, :] * s.linear_head_dim**-0.5
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + s.rms_norm_eps) * m.norm.weight
        out = out * F.silu(linear(h, m.in_proj_z.weight, dt).float().view(out.shape))
        return x + linear(out.flatten(1), m.out_proj.weight, dt).float()
