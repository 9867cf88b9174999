"""Where a decode step goes, in six parts, for `step_profile.json` of a run directory (the page's Section C–C).

Kernels are timed one after the other: overlapped ones would count each other's time, so the parts may add up to a bit
more than a step takes. All products are one kernel to the profiler; the order of the calls tells them apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ..cuda.graphs import RUNS_A_CAPTURE
from ..cuda.kernels.linear import Norm, Residual
from ..cuda.kernels.packing import PackedLinear
from ..cuda.kernels.products import CudaProducts, Products
from ..cuda.session import CudaSession, Tuning
from ..cuda.weights import CudaWeights
from ..errors import DecoderError

WEIGHTS, VERIFY_HEAD, DRAFT_HEADS = "weights", "verify head", "draft heads"
GDN, ATTENTION, REST = "Gated DeltaNet", "attention", "rest"
PARTS = (WEIGHTS, VERIFY_HEAD, DRAFT_HEADS, GDN, ATTENTION, REST)
_PRODUCT = "linear"  # what the kernel of every product is called
_BY_NAME = {
    **dict.fromkeys(("gdn", "recur", "gate_output"), GDN),
    **dict.fromkeys(("split", "combine", "rope_qk", "attend"), ATTENTION),
    **dict.fromkeys(("lower_bound", "decide", "pick"), VERIFY_HEAD),  # screened_head.py
}


@dataclass
class NotedProducts:
    """Products that note which part each call belongs to, in order."""

    inner: Products
    verify_head: PackedLinear
    calls: list[str] = field(default_factory=list)

    def store(
        self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, norm: Norm | None = None,
        *, next_reads_x: bool = False,
    ) -> None:  # fmt: skip
        """As Products."""
        self.calls.append(VERIFY_HEAD if packed is self.verify_head else WEIGHTS)
        self.inner.store(x, packed, out, norm, next_reads_x=next_reads_x)

    def add(self, x: torch.Tensor, packed: PackedLinear, residual: Residual) -> None:
        """As Products."""
        self.calls.append(WEIGHTS)
        self.inner.add(x, packed, residual)

    def swiglu(self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, norm: Norm) -> None:
        """As Products."""
        self.calls.append(WEIGHTS)
        self.inner.swiglu(x, packed, out, norm)

    def argmax(self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor) -> None:
        """As Products."""
        self.calls.append(DRAFT_HEADS)
        self.inner.argmax(x, packed, out)

    def of_a_step(self, runs: int) -> list[str]:
        """The calls of one step, of which `runs` were made since the last clear()."""
        step = self.calls[: len(self.calls) // runs]
        if not step or step * runs != self.calls:
            raise DecoderError(
                f"{len(self.calls)} products were called in {runs} equal steps", "this is a bug: report it"
            )
        return step


def part_of(kernel: str) -> str:
    """The part of a kernel that is no product."""
    return next((part for start, part in _BY_NAME.items() if kernel.startswith(start)), REST)


def parts_ms(kernels: Sequence[tuple[str, float]], products: Sequence[str], steps: int) -> dict[str, float]:
    """Milliseconds a step by part, from (name, µs) of all kernels of `steps` steps in the order they ran.

    products: the part of each product of one step. Raises DecoderError where another number of them ran.
    """
    totals = dict.fromkeys(PARTS, 0.0)
    ran = 0
    for name, micros in kernels:
        if name.startswith(_PRODUCT):
            totals[products[ran % len(products)]] += micros
            ran += 1
        else:
            totals[part_of(name)] += micros
    if ran != steps * len(products):
        raise DecoderError(
            f"the profiler saw {ran} kernels named {_PRODUCT}…, expected {steps} steps of {len(products)}",
            "it drops events when its buffer is full: profile fewer steps",
        )
    return {part: micros / 1e3 / steps for part, micros in totals.items()}


class StepProfiler:
    """A session over given weights whose kernels run one after the other, profiled at any depth."""

    def __init__(self, session: CudaSession, num_drafts: int, max_context: int, steps: int = 8) -> None:
        """session: only its weights are used; a state of its own is allocated for max_context tokens."""
        weights: CudaWeights = session.weights
        card = torch.device("cuda", torch.cuda.current_device())
        noted = NotedProducts(CudaProducts(weights.linears(), card, overlap=False), weights.head.screen)
        self.session = CudaSession(
            session.config,
            weights,
            noted,
            max_context=max_context,
            device=card,
            tuning=Tuning(overlap=False, pdl=False),
        )
        self.num_drafts, self.steps = num_drafts, steps
        noted.calls.clear()
        self.session.capture(num_drafts)
        self.products = noted.of_a_step(RUNS_A_CAPTURE)

    def trace(self, prompt: list[int]) -> list[tuple[str, float]]:
        """(name, µs) of every kernel of `steps` steps after the prompt, in the order they ran."""
        self.session.prefill(prompt)
        self.session.step(self.num_drafts)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(self.steps):
                self.session.step(self.num_drafts)
            torch.cuda.synchronize()
        events = [event for event in trace.events() or () if str(event.device_type).endswith("CUDA")]
        events.sort(key=lambda event: event.time_range.start)
        return [(event.name, event.time_range.elapsed_us()) for event in events]

    def parts(self, prompt: list[int]) -> dict[str, float]:
        """Milliseconds a step by part."""
        return parts_ms(self.trace(prompt), self.products, self.steps)


def write_profile(path: Path, build: str, by_depth: dict[int, dict[str, float]]) -> None:
    """Add one build's parts to a step_profile.json, in place of what it held of that build.

    Raises DecoderError for a file of another form.
    """
    document: dict[str, object] = {}
    if path.exists():
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DecoderError(f"{path} is not JSON: {error}", "name a new file, or a step_profile.json") from None
    builds = document.get("builds", {}) if isinstance(document, dict) else None
    if not isinstance(builds, dict):
        raise DecoderError(f"{path} is no step profile", "name a new file, or a step_profile.json")
    builds[build] = [
        {"depth": depth, "parts": [{"name": name, "ms": round(ms, 6)} for name, ms in parts.items()]}
        for depth, parts in sorted(by_depth.items())
    ]
    path.write_text(json.dumps({"builds": builds}, indent=1) + "\n", encoding="utf-8")
