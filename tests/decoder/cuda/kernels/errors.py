"""How far a kernel's result is from the truth."""

import torch


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """‖value − truth‖ / ‖truth‖; NaN never compares small."""
    return float((value.double() - truth.double()).norm() / truth.double().norm())
