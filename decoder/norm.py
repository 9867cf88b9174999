"""The one normalisation of the model, in fp32."""

from __future__ import annotations

import math

import torch


def scaled_unit(x: torch.Tensor, scale: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x·rsqrt(Σx² + eps)·scale over the last dimension; `scale` broadcasts, `eps` is an fp32 scalar tensor.

    GDN keys are normalised this way. RMSNorm is the same thing: rsqrt(mean x² + e) = √n·rsqrt(Σx² + n·e).
    """
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide * torch.addcmul(eps, length, length).rsqrt_() * scale).to(x.dtype)


class RmsNorm:
    """RMSNorm with a given fp32 weight, its √n folded in at load."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [..., n] in fp32, what the normalised x is multiplied by (so 1 + w where the checkpoint stores w)."""
        size = weight.shape[-1]
        self.scale = weight * math.sqrt(size)
        self.eps = torch.tensor(eps * size, dtype=torch.float32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] → the same shape and dtype."""
        return scaled_unit(x, self.scale, self.eps)
