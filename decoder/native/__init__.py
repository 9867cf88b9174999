"""The CPU decoder's step and prefill in C++, compiled on first use; the plain PyTorch session is its reference."""
