"""Every Triton kernel compiles for sm_80 and sm_90 without a GPU, inside the shared memory of the card."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from kernarc.decoder.cuda.kernels.nvrtc import SHARED_LIMIT_BYTES

from .compile_kernels import groups

OF_A_STEP = ("recur_kernel", "gdn_prepare_kernel", "split_kernel", "combine_kernel")
OF_PREFILL = ("chunk_kernel",)


@cache
def compiled(arch: int) -> subprocess.CompletedProcess[str]:
    """What compile_kernels.py writes, in a process where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(Path(__file__).with_name("compile_kernels.py")), str(arch)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    ("arch", "group"), [(arch, group) for arch in SHARED_LIMIT_BYTES for group in groups(arch)], ids=str
)
def test_its_kernels_compile(arch: int, group: str) -> None:
    done = compiled(arch)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(f"{group} sm_{arch} ")]
    assert [line for line in lines if not line.endswith(" ok")] == []
    for kernel in OF_PREFILL if group == "prefill" else OF_A_STEP:
        assert any(kernel in line for line in lines)
