"""Pairs: one request, one launch, an ok stream on both sides. What cannot be paired is said, never dropped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..harness.client.metrics import step_ms, tokens_per_step, tpot_ms, ttft_ms
from ..harness.run.records import StreamRecord, StreamStatus

Floats = NDArray[np.float64]
Key = tuple[int, int, str]  # depth, launch, request_id


@dataclass(frozen=True)
class Pair:
    """Two ok streams of one request in one launch; tpot_ms of both is a finite number above zero."""

    baseline: StreamRecord
    candidate: StreamRecord

    @property
    def log_tpot_ratio(self) -> float:
        """d = ln(TPOT candidate / TPOT baseline): above zero is slower."""
        return _log_ratio(tpot_ms(self.candidate), tpot_ms(self.baseline))

    @property
    def log_step_ratio(self) -> float | None:
        """ln of the ratio of step times; None where an event is not known to be a step on either side."""
        return _optional_log_ratio(step_ms(self.candidate), step_ms(self.baseline))

    @property
    def log_tokens_per_step_ratio(self) -> float | None:
        """ln of the ratio of tokens a step; log_tpot_ratio = log_step_ratio − log_tokens_per_step_ratio."""
        return _optional_log_ratio(tokens_per_step(self.candidate), tokens_per_step(self.baseline))

    @property
    def log_ttft_ratio(self) -> float | None:
        """ln of the ratio of times to first token; None where a stream's first token came no later than its request."""
        return _optional_log_ratio(ttft_ms(self.candidate), ttft_ms(self.baseline))


@dataclass(frozen=True)
class DepthPairs:
    """All pairs of one depth, by launch; every launch here has at least one pair."""

    depth: int
    launches: tuple[tuple[Pair, ...], ...]

    @property
    def count(self) -> int:
        """Pairs over all launches."""
        return sum(len(pairs) for pairs in self.launches)

    def log_tpot_ratios(self) -> list[Floats]:
        """One array of d a launch."""
        return [np.array([pair.log_tpot_ratio for pair in pairs], dtype=np.float64) for pairs in self.launches]

    def log_step_ratios(self) -> list[Floats] | None:
        """One array a launch; None where any pair has no step time."""
        return _complete([[pair.log_step_ratio for pair in pairs] for pairs in self.launches])

    def log_tokens_per_step_ratios(self) -> list[Floats] | None:
        """One array a launch; None where any pair has no steps."""
        return _complete([[pair.log_tokens_per_step_ratio for pair in pairs] for pairs in self.launches])

    def log_ttft_ratios(self) -> list[Floats] | None:
        """One array a launch; None where any pair has no time to first token."""
        return _complete([[pair.log_ttft_ratio for pair in pairs] for pairs in self.launches])


@dataclass(frozen=True)
class Pairing:
    """Pairs by depth over the same launches, and why they may not be used (empty: they may)."""

    depths: tuple[DepthPairs, ...]
    launches: tuple[int, ...]
    void_reasons: tuple[str, ...]


def pair_streams(
    streams: Sequence[StreamRecord],
    *,
    baseline: str,
    candidate: str,
    depths: Sequence[int],
    launches: Sequence[int],
    requests_per_depth: int,
    max_missing_pairs_per_depth: int = 0,
    void_blocks: frozenset[tuple[int, int]] = frozenset(),
) -> Pairing:
    """Pair the measured streams of two builds.

    launches: those that were measured to their end. void_blocks: (launch, block) that a control build voided; their
    pairs do not count and are not missing. Anything else that is absent, void, doubled, unequal or not a finite time
    is a void reason once a depth has more than max_missing_pairs_per_depth of it.
    """
    if baseline == candidate:
        raise ValueError("a comparison needs two build names")
    sides, reasons = _index_streams(streams, {baseline, candidate}, set(launches), void_blocks)
    left, right = sides[baseline], sides[candidate]
    pairs: dict[tuple[int, int], list[Pair]] = {(depth, launch): [] for depth in depths for launch in launches}
    faults: dict[int, list[str]] = {depth: [] for depth in depths}
    excluded = _excluded_counts(streams, baseline, void_blocks)
    for key in sorted(left.keys() | right.keys()):
        depth, launch, _ = key
        if (depth, launch) not in pairs:
            continue
        fault = _pair_fault(left.get(key), right.get(key))
        if fault is None:
            pairs[depth, launch].append(Pair(left[key], right[key]))
        else:
            faults[depth].append(f"{key[2]} in launch {launch}: {fault}")
    for depth, launch in pairs:
        planned = requests_per_depth - excluded.get((depth, launch), 0)
        seen = sum(1 for key in left.keys() | right.keys() if key[:2] == (depth, launch))
        faults[depth].extend(["no stream on either side"] * max(0, planned - seen))
    reasons.extend(_missing_reasons(faults, max_missing_pairs_per_depth))
    usable = tuple(launch for launch in launches if all(pairs[depth, launch] for depth in depths))
    grouped = tuple(DepthPairs(depth, tuple(tuple(pairs[depth, launch]) for launch in usable)) for depth in depths)
    reasons.extend(_copied_reasons(grouped))
    if not depths or not usable:
        reasons.append("no launch has a pair at every depth")
    return Pairing(grouped, usable, tuple(reasons))


def _index_streams(
    streams: Sequence[StreamRecord], builds: set[str], launches: set[int], void_blocks: frozenset[tuple[int, int]]
) -> tuple[dict[str, dict[Key, StreamRecord]], list[str]]:
    sides: dict[str, dict[Key, StreamRecord]] = {build: {} for build in builds}
    reasons: list[str] = []
    for stream in streams:
        counts = stream.build in builds and stream.launch in launches and not stream.is_warmup
        if not counts or (stream.launch, stream.block) in void_blocks:
            continue
        key = (stream.depth, stream.launch, stream.request_id)
        if key in sides[stream.build]:
            reasons.append(f"{stream.build} has two streams of {stream.request_id} in launch {stream.launch}")
        sides[stream.build][key] = stream
    return sides, reasons


def _excluded_counts(
    streams: Sequence[StreamRecord], baseline: str, void_blocks: frozenset[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    counts: dict[tuple[int, int], int] = {}
    for stream in streams:
        if stream.build == baseline and not stream.is_warmup and (stream.launch, stream.block) in void_blocks:
            key = (stream.depth, stream.launch)
            counts[key] = counts.get(key, 0) + 1
    return counts


def _pair_fault(baseline: StreamRecord | None, candidate: StreamRecord | None) -> str | None:
    """Why two streams are not a pair; None where they are."""
    for side, stream in (("baseline", baseline), ("candidate", candidate)):
        if stream is None:
            return f"the {side} has no stream"
        if stream.status is not StreamStatus.OK:
            return f"the {side}'s stream is void ({stream.void_reason or 'no reason given'})"
        if not _is_time(tpot_ms(stream)):
            return f"the {side}'s time per token is {tpot_ms(stream)}"
    assert baseline is not None
    assert candidate is not None
    if (baseline.request_sha256, baseline.prompt_ids_sha256) != (candidate.request_sha256, candidate.prompt_ids_sha256):
        return "the two builds were sent different requests"
    return None


def _is_time(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _missing_reasons(faults: dict[int, list[str]], allowed: int) -> list[str]:
    return [
        f"depth {depth}: {len(found)} pair{'s' if len(found) > 1 else ''} missing, {allowed} allowed; first: {found[0]}"
        for depth, found in faults.items()
        if len(found) > allowed
    ]


def _copied_reasons(depths: Sequence[DepthPairs]) -> list[str]:
    """Two measured builds never take exactly the same time in every pair: such records were copied."""
    return [
        f"depth {pairs.depth}: every pair has exactly the same time on both sides, so one side was not measured"
        for pairs in depths
        if pairs.count > 1 and all(not ratios.any() for ratios in pairs.log_tpot_ratios())
    ]


def _log_ratio(candidate: float | None, baseline: float | None) -> float:
    if candidate is None or baseline is None:
        raise ValueError("a pair without a time per token")
    return math.log(candidate / baseline)


def _optional_log_ratio(candidate: float | None, baseline: float | None) -> float | None:
    if candidate is None or baseline is None or not candidate > 0 or not baseline > 0:
        return None
    return math.log(candidate / baseline)


def _complete(launches: list[list[float | None]]) -> list[Floats] | None:
    if any(value is None for values in launches for value in values):
        return None
    return [np.array(values, dtype=np.float64) for values in launches]
