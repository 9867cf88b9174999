"""A directory that appears under its name only when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A working directory beside `out` that becomes `out` at the end, or vanishes on any error.

    Raises CheckpointError where `out` exists (an empty directory aside) or cannot be made.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} already exists", "choose another directory, or remove it first")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{partial.parent} cannot be written to: {error.strerror}") from None
    try:
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"writing {out} failed: {error.strerror or error}", "see that the disk has room"
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
