"""Runs a .cu file of the decoder on the CPU (emulate.h): the kernel's own source, barriers and shuffles included."""

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

HEADER = Path(__file__).with_name("emulate.h")
PRODUCTS = HEADER.with_name("emulate_products.h")
COMPILER = shutil.which("g++")
_ENTRY = """
static const Arguments* arguments;
static void entry() {{ {name}(*arguments); self->done = true; pause_fiber(); }}
extern "C" void run(const Arguments* a, int clusters, int blocks) {{
    arguments = a;
    run_clusters(entry, clusters, blocks, THREADS, sizeof(Shared));
}}
"""


@cache
def _library(source: Path, name: str, defines: tuple[tuple[str, int], ...], folder: Path) -> ctypes.CDLL:
    assert COMPILER is not None
    program = f'#include "{HEADER}"\n#include "{source}"\n' + _ENTRY.format(name=name)
    texts = [path.read_text() for path in (source, HEADER, PRODUCTS)]
    key = hashlib.sha256(repr((program, *texts, defines)).encode()).hexdigest()[:16]
    library = folder / f"{name}-{key}.so"
    command = [COMPILER, "-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
    command += ["-DEMULATED", *(f"-D{key}={value}" for key, value in defines), "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=program, text=True, check=True, timeout=120)
    return ctypes.CDLL(str(library))


def emulate(
    source: Path,
    name: str,
    defines: Mapping[str, int],
    arguments: ctypes.Structure,
    folder: Path,
    *,
    grid: int,
    together: int,
) -> None:
    """Run kernel `name` over `grid` CTAs, `together` of them at a time; the arguments hold host addresses."""
    library = _library(source, name, tuple(sorted(defines.items())), folder)
    library.run(ctypes.byref(arguments), grid // together, together)
