"""Every Triton kernel compiles for sm_80 and sm_90 without a GPU, inside the shared memory of the card."""

import os
import subprocess
import sys


def test_all_kernels_compile_for_both_cards() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernarc.decoder.bench.compile_check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(line for line in lines if not line.endswith(" ok")) + done.stderr
    for arch in ("sm_80", "sm_90"):
        for kernel in ("recur_kernel", "gdn_prepare_kernel", "split_kernel", "combine_kernel", "chunk_kernel"):
            assert any(arch in line and kernel in line for line in lines)
