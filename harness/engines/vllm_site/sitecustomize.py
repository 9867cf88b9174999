"""Lets stock vLLM start beside a CPU torch: its folder is on the PYTHONPATH of vLLM and of all that vLLM starts.

A package index serves torchvision, torchaudio and torchcodec built for CUDA; beside a CPU torch their libraries do not
load, and importing them fails although text-only serving never calls them. So, with a CPU torch only: when torchvision
is imported and its library cannot load, the two operator schemas that it wants are declared first; the other two, which
vLLM and transformers take as optional, look as if they were not installed. vLLM's own code runs as it was shipped.
"""

import importlib.abc
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

HIDDEN = ("torchaudio", "torchcodec")
NMS_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[Any] = []  # a schema lives as long as its library object


class TorchvisionHook(importlib.abc.MetaPathFinder):
    """Declares the schemas just before the first import of torchvision, so that no other Python pays for torch."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Never finds anything itself."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_missing_schemas()


def declare_missing_schemas() -> None:
    """Declares torchvision::nms and ::qnms where none of torchvision's libraries loads into this torch."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
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


def is_cpu_torch() -> bool:
    """Whether the installed torch was built without CUDA, told from its version file, nothing imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and re.search(r"^cuda\b.*= None", version.read_text(), re.MULTILINE) is not None


if is_cpu_torch():
    for package in HIDDEN:
        sys.modules[package] = None  # type: ignore[assignment]  # what find_spec and import take for "absent"
    sys.meta_path.insert(0, TorchvisionHook())
