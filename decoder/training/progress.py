"""What a training run tells."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """One line of progress on stdout."""
    sys.stdout.write(message + "\n")
    sys.stdout.flush()
