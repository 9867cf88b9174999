"""Without a GPU, Triton kernels run in its interpreter; that must be chosen before anything imports triton."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
