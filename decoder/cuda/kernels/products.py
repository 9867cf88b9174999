"""Every matrix product of a step behind one small interface: linear.cu on a card, its plain twin elsewhere."""

from typing import Protocol

import torch

from .linear import X_SCALE, Norm, Residual, Workspace, linear
from .linear_shape import Epilogue
from .packing import PackedLinear, unpack
from .prefill import swiglu


class Products(Protocol):
    """Linear layers at 1 … 16 rows. x is contiguous [R, K], outputs are given."""

    def store(
        self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, norm: Norm | None = None,
        *, next_reads_x: bool = False,
    ) -> None:  # fmt: skip
        """out [R, N] = norm(x)·Wᵀ. next_reads_x: so does the kernel behind, perhaps before this one has ended."""

    def add(self, x: torch.Tensor, packed: PackedLinear, residual: Residual) -> None:
        """residual.stream fp32 [R, N] += x·Wᵀ; the rest of it follows."""

    def swiglu(self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, norm: Norm) -> None:
        """out [R, N/2] = silu(gate)·up of norm(x)·Wᵀ."""

    def argmax(self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor) -> None:
        """out int64 [R] = the row of W with the largest product, the lowest on a tie."""


class CudaProducts:
    """linear.cu with one workspace for all layers."""

    def __init__(self, layers: list[PackedLinear], device: torch.device, *, overlap: bool = True) -> None:
        self._workspace = Workspace.for_layers(layers, device)
        self._overlap = overlap
        widest = max((layer.n for layer in layers if not layer.interleaved), default=1)
        self._gate_up = torch.empty(16 * widest, dtype=torch.float16, device=device)  # for gate and up kept apart

    def store(
        self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, norm: Norm | None = None,
        *, next_reads_x: bool = False,
    ) -> None:  # fmt: skip
        """As Products."""
        linear(
            x, packed, self._workspace, out=out, norm=norm, overlap=self._overlap, next_reads_x=next_reads_x
        )  # fmt: skip

    def add(self, x: torch.Tensor, packed: PackedLinear, residual: Residual) -> None:
        """As Products."""
        linear(x, packed, self._workspace, epilogue=Epilogue.RESIDUAL, residual=residual, overlap=self._overlap)

    def swiglu(self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, norm: Norm) -> None:
        """As Products."""
        if packed.interleaved:
            linear(x, packed, self._workspace, epilogue=Epilogue.SWIGLU, out=out, norm=norm, overlap=self._overlap)
            return
        gate_up = self._gate_up[: x.shape[0] * packed.n].view(x.shape[0], packed.n)
        self.store(x, packed, gate_up, norm)
        swiglu(gate_up, out)

    def argmax(self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor) -> None:
        """As Products."""
        linear(x, packed, self._workspace, epilogue=Epilogue.ARGMAX, out=out, overlap=self._overlap)


class PlainProducts:
    """The twin, for tests without a card: fp32 products of 16 padded rows, so that a row ignores its company."""

    def __init__(self) -> None:
        self._dense: dict[int, torch.Tensor] = {}

    def _product(self, x: torch.Tensor, packed: PackedLinear, norm: Norm | None = None) -> torch.Tensor:
        wide = x.float()
        if norm is not None:
            mean = norm.h_sumsq.sum(-1, keepdim=True) / packed.k
            wide = wide * torch.rsqrt(mean + norm.eps) / X_SCALE
        padded = torch.zeros(16, packed.k, device=x.device)
        padded[: len(wide)] = wide
        if id(packed) not in self._dense:
            self._dense[id(packed)] = unpack(packed)
        return (padded @ self._dense[id(packed)].T)[: len(wide)]

    def store(
        self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, norm: Norm | None = None,
        *, next_reads_x: bool = False,
    ) -> None:  # fmt: skip
        """As Products."""
        out.copy_(self._product(x, packed, norm))

    def add(self, x: torch.Tensor, packed: PackedLinear, residual: Residual) -> None:
        """As Products."""
        stream = residual.stream
        stream += self._product(x, packed)
        residual.sumsq.copy_(stream.view(len(stream), -1, 32).square().sum(-1))
        residual.x.copy_(stream * (1 + residual.next_norm.float()) * X_SCALE)

    def swiglu(self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, norm: Norm) -> None:
        """As Products."""
        gate, up = self._product(x, packed, norm).chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    def argmax(self, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor) -> None:
        """As Products."""
        out.copy_(self._product(x, packed).argmax(-1))
