"""Starts stock vLLM's own server, unchanged: `python vllm_launcher.py --model …`, arguments as vLLM's.

A package index serves torchvision built for CUDA; beside a CPU torch its library does not load and `import torchvision`
fails for want of two operator schemas that text-only serving never calls. They are declared here where, and only where,
that library cannot load. Worker processes import this file again (as `__mp_main__`), so the top level does it.
"""

import sys
from pathlib import Path

# Started by path, Python puts this folder first, where `vllm.py` and `process.py` are ours.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import importlib.util  # noqa: E402
import runpy  # noqa: E402

import torch  # noqa: E402

NMS_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # a schema lives as long as its library object


def declare_missing_torchvision_schemas() -> None:
    """Declares torchvision::nms and ::qnms where torchvision is there but its compiled library cannot load."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or torch.version.cuda is not None:
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
            return
        except OSError:
            continue
    schemas = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    schemas.define("nms" + NMS_SCHEMA)  # type: ignore[no-untyped-call]
    schemas.define("qnms" + NMS_SCHEMA)  # type: ignore[no-untyped-call]
    _declared.append(schemas)


declare_missing_torchvision_schemas()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
