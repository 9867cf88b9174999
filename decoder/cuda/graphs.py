"""CUDA graphs of whole steps: one a draft count, captured once, replayed with lengths that live on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .state import SequenceState

_WARM_UPS = 2
RUNS_A_CAPTURE = _WARM_UPS + 1


class StepGraphs:
    """Runs `step(num_drafts)`, eagerly on a CPU or on request, else by replay; its outcome ends in pinned memory."""

    def __init__(
        self, step: Callable[[int], None], result: torch.Tensor, state: SequenceState, *, enabled: bool = True
    ) -> None:
        """step leaves its outcome in `result` [1 + rows] on the device; `state` is put back after a capture."""
        self._step = step
        self._result = result
        self._state = state
        self._on_card = result.is_cuda
        self._enabled = enabled and self._on_card
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # shared by all graphs
        self._host = torch.zeros(result.shape, dtype=result.dtype, pin_memory=self._on_card)
        self._done = torch.cuda.Event() if self._on_card else None  # type: ignore[no-untyped-call]

    def capture(self, num_drafts: int) -> None:
        """Compile every kernel of this draft count and record its graph; the sequence stays as it was."""
        if num_drafts in self._graphs or not self._enabled:
            return
        kept = [(tensor, tensor.clone()) for tensor in self._state.rolling()]
        stream = torch.cuda.Stream(self._result.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._run(num_drafts)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._run(num_drafts)
        self._pool = self._pool or graph.pool()
        self._graphs[num_drafts] = graph
        for tensor, copy in kept:
            tensor.copy_(copy)
        torch.cuda.synchronize()

    def launch(self, num_drafts: int) -> None:
        """Start a step; the host goes on at once."""
        if self._enabled:
            self.capture(num_drafts)
            self._graphs[num_drafts].replay()
        else:
            self._run(num_drafts)
        if self._done is not None:
            self._done.record()

    def read(self, num_drafts: int) -> tuple[list[int], int]:
        """Wait for the step and read it: (its tokens, drafts accepted). The only wait of a step."""
        if self._done is not None:
            self._done.synchronize()
        accepted, *tokens = self._host[: num_drafts + 2].tolist()
        return tokens[: accepted + 1], accepted

    def _run(self, num_drafts: int) -> None:
        self._step(num_drafts)
        self._host.copy_(self._result, non_blocking=True)
