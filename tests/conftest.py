"""Settings that every test needs before it imports what it tests."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
import torch

# Without a GPU, Triton kernels run in its interpreter; that must be chosen before anything imports triton.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("hypothesis"):  # kernels are also tested on GPU hosts that lack it
    from hypothesis import settings

    settings.register_profile("kernarc", deadline=None)  # a busy machine makes no test fail
    settings.load_profile("kernarc")

# A shell that runs this in the background may have interrupts ignored, which every process that a test starts would
# inherit, also those that a test interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, and say so, where there is no card."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
