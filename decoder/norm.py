"""The one normalisation of the model."""

from __future__ import annotations

import math

import torch


def scaled_unit(x: torch.Tensor, scale: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x·rsqrt(Σx² + eps)·scale over the last dimension; `scale` broadcasts to x, `eps` is a scalar tensor.

    GDN keys are normalised this way. RMSNorm is the same thing: rsqrt(mean x² + e) = √n·rsqrt(Σx² + n·e).
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * torch.addcmul(eps, length, length).rsqrt_()).mul_(scale)


class RmsNorm:
    """RMSNorm with a given weight, its √n folded in at load."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [..., n], what the normalised x is multiplied by (so 1 + w where the checkpoint stores w)."""
        size = weight.shape[-1]
        self.scale = weight * math.sqrt(size)
        self.eps = torch.tensor(eps * size, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] → the same shape."""
        return scaled_unit(x, self.scale, self.eps)
