"""Muon for the matrices, AdamW for everything else, one learning rate for both, and its schedule.

Muon (Jordan et al. 2024) orthogonalises each matrix's momentum; updates are scaled to AdamW's size as in "Muon is
scalable for LLM training" (Liu et al. 2025), 0.2 sqrt(max(rows, columns)). Matrices of one size are stepped together.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of [n, rows, columns], by Newton-Schulz in bf16 on a GPU."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    transposed = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if transposed else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.transpose(1, 2) if transposed else x
    return result.float()


class Muon:
    """Momentum 0.95 with Nesterov, decoupled weight decay; state lives in one tensor a matrix size."""

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        by_size: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            by_size[parameter.shape].append(parameter)
        self.groups = [(group, torch.zeros_like(torch.stack(group))) for group in by_size.values()]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every matrix from its gradient."""
        for group, momentum in self.groups:
            gradients = torch.stack([p.grad for p in group if p.grad is not None])
            momentum.lerp_(gradients, 0.05)
            update = orthogonalise(gradients.lerp(momentum, 0.95))
            scale = 0.2 * max(update.shape[1:]) ** 0.5
            torch._foreach_mul_(group, 1 - lr * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-lr * scale)


class Optimizer:
    """Both optimisers of a model."""

    def __init__(self, model: nn.Module, weight_decay: float = 0.1) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            looks_up = "embed_tokens" in name or "lm_head" in name
            is_matrix = parameter.ndim == 2 and min(parameter.shape) >= 64 and not looks_up
            (matrices if is_matrix else others).append(parameter)
        self.parameters = [*matrices, *others]
        self.muon = Muon(matrices, weight_decay)
        self.adam = torch.optim.AdamW(
            others, lr=0.0, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=others[0].is_cuda
        )

    def step(self, lr: float) -> Tensor:
        """One update at learning rate lr; clears gradients; returns the gradient norm before clipping to 1."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.muon.step(lr)
        for parameter in self.parameters:
            parameter.grad = None
        return norm


def learning_rate(progress: float, peak: float, final_share: float = 0.0) -> float:
    """Warm-up over the first 2 %, flat to 30 %, then linear to a share of the peak; progress in [0, 1]."""
    return peak * min(progress / 0.02, 1.0, final_share + (1.0 - final_share) * max(1.0 - progress, 0.0) / 0.7)
