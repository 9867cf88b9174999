"""CUDA C++ kernels compiled at run time by NVRTC (it comes with torch's CUDA builds; no nvcc needed) and launched.

Compiled binaries are cached on disk by source, definitions and card, so the second start costs nothing.
"""

import ctypes
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...errors import DecoderError

SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # a block's, on an A100 and on an H100 or H200


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kernarc" / "cubin"


OWN_FEATURES = "own features:"  # in a source: it needs what only this very card has (sm_90a: warp group products)


def compile_cubin(source: str, arch: int, defines: Mapping[str, int]) -> bytes:
    """Machine code of `source` for sm_{arch}; needs no GPU. Raises DecoderError with the compiler's log."""
    from cuda.bindings import nvrtc

    own = "a" if OWN_FEATURES in source else ""
    options = [f"--gpu-architecture=sm_{arch}{own}".encode(), b"--std=c++17", b"--device-as-default-execution-space"]
    options += [f"-D{name}={value}".encode() for name, value in sorted(defines.items())]
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, None, None)
    _check(error, "create a compilation")
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        size = nvrtc.nvrtcGetProgramLogSize(program)[1]
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise DecoderError(
            f"a CUDA kernel did not compile for sm_{arch}:\n{log.decode(errors='replace').rstrip(chr(0))}",
            "this is a fault of the decoder: please report it with the lines above",
        )
    error, size = nvrtc.nvrtcGetCUBINSize(program)
    _check(error, "read the compiled size")
    cubin = b" " * size
    _check(nvrtc.nvrtcGetCUBIN(program, cubin)[0], "read the compiled code")
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


def cached_cubin(source: str, arch: int, defines: Mapping[str, int]) -> bytes:
    """As compile_cubin, from the disk cache where it was compiled before."""
    key = hashlib.sha256(repr((source, arch, sorted(defines.items()))).encode()).hexdigest()
    path = _cache_dir() / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = compile_cubin(source, arch, defines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(cubin)
        partial.replace(path)
    except OSError:
        pass  # a read-only home costs only the next start's compile time
    return cubin


@dataclass(frozen=True)
class CudaKernel:
    """A loaded kernel that takes one struct by value."""

    function: Any
    shared_bytes: int

    @classmethod
    def load(cls, cubin: bytes, name: str, shared_bytes: int) -> "CudaKernel":
        """Load `name` into the current context with `shared_bytes` of dynamic shared memory allowed."""
        from cuda.bindings import driver

        error, module = driver.cuModuleLoadData(cubin)
        _check(error, f"load kernel {name}")
        error, function = driver.cuModuleGetFunction(module, name.encode())
        _check(error, f"find kernel {name}")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(
            driver.cuFuncSetAttribute(function, attribute, shared_bytes)[0],
            f"give {name} {shared_bytes} B of shared memory",
        )
        return cls(function, shared_bytes)

    def launch(self, grid: int, block: int, arguments: ctypes.Structure, stream: int, *, overlap: bool) -> None:
        """Launch on a stream; `overlap`: start before the previous kernel ends (programmatic dependent launch)."""
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, stream
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _check(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0)[0], "launch a kernel")


@cache
def kernel(path: Path, name: str, arch: int, shared_bytes: int, defines: tuple[tuple[str, int], ...]) -> CudaKernel:
    """The kernel `name` of the CUDA source at `path` for these definitions, compiled and loaded once a process."""
    return CudaKernel.load(cached_cubin(path.read_text(), arch, dict(defines)), name, shared_bytes)


@cache
def arch_of(device: torch.device) -> int:
    """90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _check(error: Any, what: str) -> None:
    if int(error) != 0:
        raise DecoderError(f"CUDA could not {what}: {error}", "look at `nvidia-smi`; another process may hold the card")
