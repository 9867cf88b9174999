"""What every kernel here shares: programmatic dependent launch, the positions on the device."""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Slots of the `positions` tensor (int32): all bookkeeping of a sequence that kernels read.
LENGTH = tl.constexpr(0)  # tokens committed; the next input token sits at this position
STATE_LENGTH = tl.constexpr(1)  # tokens folded into the GDN state
MTP_LENGTH = tl.constexpr(2)  # positions whose MTP keys and values come from true hidden states

RING = tl.constexpr(32)  # slots of every by-position ring: 16 rows to replay and 16 new ones
MAX_ROWS = 16

_ASKING_THREADS = tl.constexpr(128)


@dataclass(frozen=True, slots=True)
class Launch:
    """How to launch: `pdl` overlaps a kernel's start with its predecessor's end (sm_90 and later)."""

    pdl: bool = False

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments every kernel takes."""
        options: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}
        return {"PDL": self.pdl, **options}


PLAIN = Launch()


@triton.jit
def enter(PDL: tl.constexpr):
    """Wait for the previous kernel's results, then let the next kernel start its own prologue."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def ask_l2(p_first, SHARE: tl.constexpr):
    """128 requests to L2 of SHARE bytes each (sm_90)."""
    thread = tl.arange(0, _ASKING_THREADS)
    address = p_first.to(tl.int64, bitcast=True) + thread.to(tl.int64) * SHARE
    size = tl.full([_ASKING_THREADS], SHARE, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
