"""A control build runs in every block and never changes: where it drifts the machine did, and the block is void."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ..harness.client.metrics import step_ms, tpot_ms
from ..harness.run.records import StreamRecord, StreamStatus

Block = tuple[int, int]  # launch, block


@dataclass(frozen=True)
class ControlReport:
    """Blocks that the control voids, and why nothing may be used (empty: the rest may)."""

    void_blocks: frozenset[Block]
    void_reasons: tuple[str, ...]
    blocks: int = 0  # judged


NO_CONTROL = ControlReport(frozenset(), ())


def judge_blocks(
    streams: Sequence[StreamRecord], control: str, *, max_drift: float, max_void_share: float
) -> ControlReport:
    """A block is void where the control's step time is off its median over all blocks of that depth.

    Step time, because the blocks hold different texts, and those differ in how many drafts are accepted; time per token
    where a server's events are not steps. max_drift: allowed distance, a fraction. A block whose control has no sound
    stream is void too. More than max_void_share of void blocks voids the comparison.
    """
    measured = [stream for stream in streams if not stream.is_warmup]
    blocks = {(stream.depth, stream.launch, stream.block) for stream in measured}
    times: dict[tuple[int, int, int], list[float]] = {block: [] for block in blocks}
    sound = [stream for stream in measured if stream.build == control and stream.status is StreamStatus.OK]
    metric = step_ms if all(step_ms(stream) is not None for stream in sound) else tpot_ms
    for stream in sound:
        time = metric(stream)
        if time is not None and time > 0:
            times[stream.depth, stream.launch, stream.block].append(math.log(time))
    levels = {block: fmean(values) for block, values in times.items() if values}
    void = {block for block in blocks if block not in levels or _drift(block, levels) > max_drift}
    reasons = []
    if not blocks:
        reasons.append(f"the control build {control} has no stream")
    elif len(void) > max_void_share * len(blocks):
        reasons.append(
            f"the control build {control} drifted by more than {max_drift:.0%} in {len(void)} of {len(blocks)} blocks, "
            f"{max_void_share:.0%} allowed"
        )
    return ControlReport(frozenset((launch, block) for _, launch, block in void), tuple(reasons), len(blocks))


def _drift(block: tuple[int, int, int], levels: dict[tuple[int, int, int], float]) -> float:
    same_depth = [level for (depth, _, _), level in levels.items() if depth == block[0]]
    return math.expm1(abs(levels[block] - median(same_depth)))
