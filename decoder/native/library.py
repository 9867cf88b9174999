"""The compiled library, loaded once a process."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

from .build import NativeUnavailableError, compiler_version, library_path
from .layout import LayerView, MatrixView, ModelView

log = logging.getLogger("kernarc.decoder")
PATH_VARIABLE = "KERNARC_CPU_PATH"  # native: fail where it cannot be had; plain: never; unset: native where possible

_POINTER = ctypes.c_void_p
_INT, _LONG = ctypes.c_int, ctypes.c_int64
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "create": ([_POINTER], _POINTER),
    "destroy": ([_POINTER], None),
    "bind": ([_POINTER, _INT, _POINTER, _POINTER, _LONG], None),
    "reads_halves": ([], _INT),
    "bind_halves": ([_POINTER, _POINTER, _POINTER], None),
    "reset": ([_POINTER, _LONG], None),
    "prefill": ([_POINTER, _POINTER, _INT, _LONG, _INT, _INT], None),
    "first_token": ([_POINTER, _INT], _LONG),
    "draft": ([_POINTER, _INT, _POINTER], None),
    "step": ([_POINTER, _POINTER, _INT, _POINTER], _INT),
    "read_backlog": ([_POINTER, _INT], None),
    "backlog_rows": ([_POINTER], _INT),
    "max_rows": ([], _INT),
    "sizes": ([_POINTER], None),
    "last_rows": ([_POINTER, _INT, _POINTER, _POINTER], None),
    "exp": ([_POINTER, _POINTER, _LONG], None),
    "exp2": ([_POINTER, _POINTER, _LONG], None),
    "softplus": ([_POINTER, _POINTER, _LONG], None),
    "measure_arithmetic": ([_INT], ctypes.c_double),
    "measure_reading": ([_POINTER, _LONG], ctypes.c_double),
    "measure_product": ([_POINTER, _POINTER, _INT, _POINTER], ctypes.c_double),
}


@functools.cache
def load_library() -> ctypes.CDLL:
    """This machine's library, compiled where needed. Raises NativeUnavailableError."""
    return open_library(library_path())


def open_library(path: Path) -> ctypes.CDLL:
    """A compiled library, its functions kernarc_* with their types. Raises NativeUnavailableError."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}", "remove it and try again") from None
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, f"kernarc_{name}")
        function.argtypes, function.restype = arguments, result
    sizes = (ctypes.c_int64 * 3)()
    library.kernarc_sizes(sizes)
    expected = [ctypes.sizeof(view) for view in (MatrixView, LayerView, ModelView)]
    assert list(sizes) == expected, f"structures of model.h and layout.py differ: {list(sizes)}, {expected}"
    return library


def describe_path() -> tuple[bool, str]:
    """(whether the C++ path is taken on this CPU, which one and why), compiling it where that is still to be done."""
    if os.environ.get(PATH_VARIABLE) == "plain":
        return False, f"plain PyTorch, because {PATH_VARIABLE} is plain"
    try:
        load_library()
    except NativeUnavailableError as error:
        return False, f"plain PyTorch, several times slower: {error.message}"
    return True, f"C++, compiled by {compiler_version()}"


def native_library(wanted: bool | None) -> ctypes.CDLL | None:
    """The library, or None for the plain PyTorch path.

    wanted: True fails where it cannot be had, False never takes it, None leaves it to KERNARC_CPU_PATH and otherwise
    takes it where possible, with a line in the log where not.
    """
    if wanted is None:
        choice = os.environ.get(PATH_VARIABLE, "")
        if choice not in ("", "native", "plain"):
            raise NativeUnavailableError(f"{PATH_VARIABLE} is {choice!r}, expected native, plain or nothing")
        wanted = {"native": True, "plain": False}.get(choice)
    if wanted is False:
        return None
    try:
        return load_library()
    except NativeUnavailableError as error:
        if wanted:
            raise
        log.warning("decoding in plain PyTorch, several times slower: %s", "; ".join(str(error).splitlines()))
        return None
