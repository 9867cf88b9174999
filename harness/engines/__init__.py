"""Inference engines as processes that speak HTTP."""
