"""The compile-time constants of linear.cu: how a product of so many rows is laid out on a card."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch

from ...errors import DecoderError
from .nvrtc import SHARED_LIMIT_BYTES
from .packing import BLOCK, PackedLinear

THREADS = 512
STAGE_BYTES = 16 * 1024
MAX_DEPTH = 10  # stages of the ring
IN_FLIGHT = 3  # of them under way at a time on sm_90; see linear.cu


class Epilogue(IntEnum):
    """What happens to a finished output element."""

    STORE = 0
    RESIDUAL = 1
    SWIGLU = 2
    ARGMAX = 3


@dataclass(frozen=True)
class Variant:
    """Which of the kernel's forms: types by number (0 fp16, 1 bf16, 2 fp32)."""

    x_type: int
    has_norm: bool
    epilogue: Epilogue
    out_type: int
    next_reads_x: bool = False


@dataclass(frozen=True)
class Shape:
    """Everything of a call that is a compile-time constant besides its variant."""

    n: int
    k: int
    tiles: int
    chunks: int  # a tile
    m: int
    ctas: int
    slots: int
    is_fp8: bool
    scale_mode: int
    shared_limit_bytes: int
    is_int8: bool = False

    @property
    def fixed_shared_bytes(self) -> int:
        """Shared memory besides the ring: partial sums, and the columns of x and the scales that a CTA needs."""
        share = -(-self.tiles * self.chunks // self.ctas)
        sums, x = 4 * self.m * 128 * 4, min(share, self.chunks) * (256 if self.is_fp8 else 128) * self.m
        scales = share * (1, 2, 16)[self.scale_mode] * 4 if self.is_fp8 else 0
        return sums + x + scales

    @property
    def is_bulk(self) -> bool:
        """Whether a warp of its own fills the ring by bulk copies (sm_90)."""
        return self.shared_limit_bytes == SHARED_LIMIT_BYTES[90]

    @property
    def threads(self) -> int:
        """Threads a CTA."""
        return THREADS + 32 * self.is_bulk

    @property
    def depth(self) -> int:
        """Stages of the ring."""
        return max(2, min(MAX_DEPTH, (self.shared_limit_bytes - 1024 - self.fixed_shared_bytes) // STAGE_BYTES))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a CTA asks for."""
        return self.depth * STAGE_BYTES + self.fixed_shared_bytes

    def definitions(self, variant: Variant) -> dict[str, int]:
        """The compile-time constants of linear.cu."""
        return {
            "N": self.n,
            "K": self.k,
            "TILES": self.tiles,
            "CHUNKS": self.chunks,
            "KB": -(-self.k // BLOCK),
            "M": self.m,
            "CTAS": self.ctas,
            "SLOTS": self.slots,
            "FP8": int(self.is_fp8),
            "INT8": int(self.is_int8),
            "SCALES": self.scale_mode,
            "X_TYPE": variant.x_type,
            "NORM": int(variant.has_norm),
            "EPILOGUE": int(variant.epilogue),
            "OUT_TYPE": variant.out_type,
            "NEXT_READS_X": int(variant.next_reads_x),
            "DEPTH": self.depth,
            "IN_FLIGHT": min(IN_FLIGHT, self.depth - 1),
        }


def shape_of(packed: PackedLinear, m: int, processors: int, arch: int) -> Shape:
    """The shape of a call of m rows on a card of so many SMs. Raises DecoderError where it does not fit."""
    total = packed.tiles * packed.chunks
    ctas = min(processors, total)
    if (total + 1) * ctas >= 2**32:
        raise DecoderError(f"linear: {packed.n}×{packed.k} is too large", "index arithmetic is 32 bits wide")
    limit = SHARED_LIMIT_BYTES[90 if arch >= 90 else 80]
    shape = Shape(
        packed.n,
        packed.k,
        packed.tiles,
        packed.chunks,
        m,
        ctas,
        slots(packed, processors),
        packed.is_fp8,
        packed.scale_mode,
        limit,
        packed.is_int8,
    )
    if shape.shared_bytes > limit:
        raise DecoderError(
            f"linear: {m} rows of {packed.k} columns need {shape.shared_bytes} B shared memory; sm_{arch} has {limit}",
            "use fewer draft tokens",
        )
    return shape


def most_rows(sizes: Iterable[tuple[int, int]], at_most: int, processors: int, arch: int) -> int:
    """How many rows, at most so many, FP8 products of every (N, K) hold on a card of so many SMs; 0 where not one."""
    layers = [PackedLinear(torch.empty(0), torch.empty(1), None, n, k) for n, k in sizes]

    def fit(rows: int) -> bool:
        try:
            return all(shape_of(packed, rows, processors, arch) for packed in layers)
        except DecoderError:
            return False

    return max((rows for rows in range(1, at_most + 1) if fit(rows)), default=0)


def slots(packed: PackedLinear, processors: int) -> int:
    """The most CTAs that share one tile."""
    return _slots(packed.tiles, packed.chunks, min(processors, packed.tiles * packed.chunks))


@cache
def _slots(tiles: int, chunks: int, ctas: int) -> int:
    def cta_of(chunk: int) -> int:
        return ((chunk + 1) * ctas - 1) // (tiles * chunks)

    return max(cta_of((tile + 1) * chunks - 1) - cta_of(tile * chunks) + 1 for tile in range(tiles))
