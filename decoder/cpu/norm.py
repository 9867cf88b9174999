"""The one normalisation of the model: to unit length, with everything else folded into what comes next."""

from __future__ import annotations

import math

import torch


def root_eps(size: int, eps: float, device: torch.device) -> torch.Tensor:
    """√(n·eps), which `unit` takes where RMSNorm over n = `size` values takes eps."""
    return torch.tensor(math.sqrt(size * eps), device=device)


def unit(x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x / √(Σx² + eps²) over the last dimension; `eps` is a scalar tensor.

    GDN keys are normalised this way. RMSNorm with weight w is √n·w times this: rsqrt(mean x² + e) = √n / √(Σx² + n·e).
    """
    length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.hypot_(eps)


class RmsNorm:
    """RMSNorm whose result is needed as it is."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [..., n], what the normalised x is multiplied by (so 1 + w where the checkpoint stores w)."""
        size = weight.shape[-1]
        self.scale = weight * math.sqrt(size)
        self.eps = root_eps(size, eps, weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] → the same shape."""
        return unit(x, self.eps).mul_(self.scale)


class FoldedNorm:
    """RMSNorm in front of a projection: its weight is multiplied into the projection at load."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [n], as in RmsNorm."""
        self.scale = weight * math.sqrt(weight.shape[0])
        self.eps = root_eps(weight.shape[0], eps, weight.device)

    def fold(self, projections: list[torch.Tensor]) -> torch.Tensor:
        """Matrices [N_i, n] that all read the norm → one [n, ΣN_i] for x̂ @ matrix, x̂ the result of this norm."""
        return (torch.cat(projections) * self.scale).t().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, n] → unit rows, to be multiplied by what `fold` returned."""
        return unit(x, self.eps)
