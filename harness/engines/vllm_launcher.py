"""Starts stock vLLM's own server, unchanged: `python vllm_launcher.py --model …`, arguments as vLLM's.

A package index serves torchvision, torchaudio and torchcodec built for CUDA; beside a CPU torch their libraries do not
load, and importing them fails although text-only serving never calls them. Only where a library cannot load:
torchvision's two operator schemas are declared, and the other two are hidden as if they were not installed (vLLM and
transformers take both as optional). Worker processes import this file again as `__mp_main__`, hence the top level.
"""

import sys
from pathlib import Path

# Started by path, Python puts this folder first, where `vllm.py` and `process.py` are ours.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import importlib.util  # noqa: E402
import runpy  # noqa: E402

import torch  # noqa: E402

NMS_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPTIONAL_LIBRARIES = {"torchaudio": "lib/*torchaudio*.so", "torchcodec": "libtorchcodec_image*.so"}
_declared: list[torch.library.Library] = []  # a schema lives as long as its library object


def library_fails(package: str, pattern: str) -> bool:
    """Whether the package is there and none of its compiled libraries loads into this torch."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return False
    libraries = list(Path(spec.origin).parent.glob(pattern))
    for library in libraries:
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
            return False
        except OSError:
            continue
    return bool(libraries)


def prepare() -> None:
    """Makes the imports of a CPU torch succeed; with a CUDA torch there is nothing to do."""
    if torch.version.cuda is not None:
        return
    if library_fails("torchvision", "_C*.so"):
        schemas = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        schemas.define("nms" + NMS_SCHEMA)  # type: ignore[no-untyped-call]
        schemas.define("qnms" + NMS_SCHEMA)  # type: ignore[no-untyped-call]
        _declared.append(schemas)
    for package, pattern in OPTIONAL_LIBRARIES.items():
        if library_fails(package, pattern):
            sys.modules[package] = None  # type: ignore[assignment]  # what find_spec and import take for "absent"


prepare()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
