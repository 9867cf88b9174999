"""Greedy continuations of many prompts at once, token by token, in plain PyTorch on the training model's weights."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import Layer, Tokens, linear, mlp_residual, rms_norm
from .layers import attention_inputs as project_attention
from .model import TrainingModel


class Rollout:
    """The state of `batch` sequences that advance together."""

    def __init__(self, model: TrainingModel, batch: int) -> None:
        self.model, self.shape, self.batch = model, model.shape, batch
        self.position = 0
        self.before_last: list[Tensor] = []  # [batch, hidden] a token: what the last layer read
        device = model.lm_head.weight.device
        s = model.shape
        self.conv = torch.zeros(s.num_layers, batch, s.conv_width, 2 * s.key_dim + s.value_dim, device=device)
        state = (s.num_layers, batch, s.linear_value_heads, s.linear_head_dim, s.linear_head_dim)
        self.state = torch.zeros(state, device=device)
        self.keys: list[list[Tensor]] = [[] for _ in range(s.num_layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(s.num_layers)]

    @torch.no_grad()
    def advance(self, ids: Tensor) -> Tensor:
        """Reads one token of every sequence, ids [batch]; the next greedy token of each."""
        model, shape = self.model, self.shape
        tokens = Tokens.of(shape, self.batch, 1, ids.device, self.position)
        x = model.model.embed_tokens(ids).float()
        for n, module in enumerate(model.model.layers):
            layer = cast(Layer, module)
            if n == shape.num_layers - 1:
                self.before_last.append(x)
            x = self._attend(n, layer, x, tokens) if shape.is_full_attention(n) else self._recur(n, layer, x)
            x = mlp_residual(x, *layer.mlp_weights(), shape.rms_norm_eps, torch.float32)
        self.position += 1
        hidden = rms_norm(x, model.model.norm.weight, shape.rms_norm_eps)
        return model.logits(hidden).argmax(-1)

    def _attend(self, n: int, layer: Layer, x: Tensor, tokens: Tokens) -> Tensor:
        a = layer.self_attn
        q, gate, k, v = project_attention(
            x, tokens.cos, tokens.sin, layer.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight,
            a.v_proj.weight, a.q_norm.weight, a.k_norm.weight, self.shape, torch.float32,
        )  # fmt: skip
        self.keys[n].append(k)
        self.values[n].append(v)
        keys, values = torch.stack(self.keys[n], 2), torch.stack(self.values[n], 2)  # [batch, kv heads, time, d]
        mixed = F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]
        return x + linear((mixed * gate.sigmoid()).flatten(1), a.o_proj.weight, torch.float32)

    def _recur(self, n: int, layer: Layer, x: Tensor) -> Tensor:
        m, s = layer.linear_attn, self.shape
        h = rms_norm(x, layer.input_layernorm.weight, s.rms_norm_eps)
        self.conv[n] = torch.cat((self.conv[n, :, 1:], m.in_proj_qkv(h)[:, None]), 1)
        mixed = F.silu((self.conv[n] * m.conv1d.weight[:, 0].T).sum(1))
        q, k, v = torch.split(mixed, [s.key_dim, s.key_dim, s.value_dim], -1)
        repeat = s.linear_value_heads // s.linear_key_heads
        q, k = (t.view(self.batch, -1, s.linear_head_dim).repeat_interleave(repeat, 1) for t in (q, k))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        v = v.view(self.batch, -1, s.linear_head_dim)
        g = -m.A_log.exp() * F.softplus(m.in_proj_a(h) + m.dt_bias)
        state = self.state[n] * g.exp()[..., None, None]
        delta = (v - (k[..., None, :] @ state)[..., 0, :]) * m.in_proj_b(h).sigmoid()[..., None]
        self.state[n] = state + k[..., None] * delta[..., None, :]
        out = (q[..., None, :] @ self.state[n])[..., 0, :] * s.linear_head_dim**-0.5
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + s.rms_norm_eps) * m.norm.weight
        out = out * F.silu(m.in_proj_z(h).view(out.shape))
        return x + linear(out.flatten(1), m.out_proj.weight, torch.float32)


def greedy(model: TrainingModel, prompts: Tensor, new_tokens: int) -> tuple[Tensor, Tensor]:
    """[batch, length] prompts -> ids [batch, length + new_tokens], and what the last layer read at all but the last
    of these tokens, [batch, length + new_tokens - 1, hidden]."""
    rollout = Rollout(model, len(prompts))
    columns = list(prompts.unbind(1))
    for n in range(prompts.shape[1] + new_tokens - 1):
        predicted = rollout.advance(columns[n])
        if n >= prompts.shape[1] - 1:
            columns.append(predicted)
    return torch.stack(columns, 1), torch.stack(rollout.before_last, 1)


def repeated(ids: Tensor, first: int, max_period: int = 40) -> Tensor:
    """Which generated tokens (from column `first` on) continue a run that has repeated itself at least once in full.

    A token counts when it equals the token one period earlier, and so did all of the period (six tokens at least)
    before it. ids: [batch, length] -> bool [batch, length].
    """
    marked = torch.zeros_like(ids, dtype=torch.bool)
    for period in range(1, max_period + 1):
        running = torch.zeros_like(ids[:, 0])
        for column in range(max(first, period), ids.shape[1]):
            running = (running + 1) * (ids[:, column] == ids[:, column - period])
            marked[:, column] |= running > max(period, 6)
    return marked
