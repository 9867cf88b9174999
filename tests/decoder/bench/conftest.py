"""Kernel tests run on the card where there is one, else in Triton's interpreter (tests/conftest.py)."""

import pytest
import torch


@pytest.fixture
def device() -> str:
    """Where kernels run here."""
    return "cuda" if torch.cuda.is_available() else "cpu"
