"""kernarc-gate: paired speed and correctness gate for speculative decoder builds."""

__version__ = "0.1.0"
