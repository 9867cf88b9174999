"""What every kernel here shares: programmatic dependent launch, the L2 prefetch hook, the positions on the device."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Slots of the `positions` tensor (int32): all bookkeeping of a sequence that kernels read.
LENGTH = tl.constexpr(0)  # tokens committed; the next input token sits at this position
STATE_LENGTH = tl.constexpr(1)  # tokens folded into the GDN state
MTP_LENGTH = tl.constexpr(2)  # positions whose MTP keys and values come from true hidden states

RING = tl.constexpr(32)  # slots of every by-position ring: 16 rows to replay and 16 new ones
MAX_ROWS = 16

_PREFETCH_PROGRAMS = 64
_PREFETCH_THREADS = tl.constexpr(128)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bytes the next matrix product will read: spare programs of a small kernel ask L2 for them."""

    tensor: torch.Tensor
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """How to launch: `pdl` overlaps a kernel's start with its predecessor's end (sm_90 and later)."""

    pdl: bool = False
    prefetch: Prefetch | None = None

    @property
    def extra_programs(self) -> int:
        """Programs to add to the grid for the prefetch."""
        return _PREFETCH_PROGRAMS if self.prefetch else 0

    def arguments(self, placeholder: torch.Tensor) -> dict[str, Any]:
        """Keyword arguments every kernel takes; `placeholder` fills the pointer when nothing is prefetched."""
        options: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}
        target = self.prefetch.tensor if self.prefetch else placeholder
        num_bytes = self.prefetch.num_bytes if self.prefetch else 0
        share = num_bytes // (_PREFETCH_PROGRAMS * _PREFETCH_THREADS.value) // 16 * 16
        return {"p_next": target, "NEXT_SHARE": share, "PDL": self.pdl, **options}


PLAIN = Launch()


@triton.jit
def enter(PDL: tl.constexpr):
    """Wait for the previous kernel's results, then let the next kernel start its own prologue."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def ask_l2(p_first, first_thread, SHARE: tl.constexpr):
    """128 requests to L2 of SHARE bytes each, from thread `first_thread` on (sm_90)."""
    thread = first_thread + tl.arange(0, _PREFETCH_THREADS)
    address = p_first.to(tl.int64, bitcast=True) + thread.to(tl.int64) * SHARE
    size = tl.full([_PREFETCH_THREADS], SHARE, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_l2(p_next, program, NEXT_SHARE: tl.constexpr):
    """Ask L2 for this program's part of the next weights."""
    if NEXT_SHARE > 0:
        ask_l2(p_next, program * _PREFETCH_THREADS, NEXT_SHARE)
