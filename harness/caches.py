"""Where engines and made checkpoints are kept between runs."""

import os
from pathlib import Path


def cache_folder(*parts: str) -> Path:
    """$XDG_CACHE_HOME/kernarc/… or ~/.cache/kernarc/…; not created here."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root.joinpath("kernarc", *parts)
