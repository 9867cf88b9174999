"""Triton kernels, one file each, beside their plain PyTorch twins."""
