"""Every emitted token against the reference: match, near-tie or divergence. Fails closed on anything that is no number.

gap = the reference's top logit − its logit of the emitted token, teacher-forced on prompt + output. 0 is a match (an
exact tie too, whichever of the two was emitted); up to τ a near-tie, which rounding may decide; above τ a divergence.
Near-ties are counted too: rounding decides few positions, a sampler many (near_ties.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...harness.client.repetition import find_repetition_loop
from ...harness.run.records import StreamRecord, StreamStatus
from ..outcomes import EmittedToken, OutputOutcome, Rate, Verdict, allowed_words
from ..rates import clustered_rate
from .near_ties import RoundingErrors, near_tie_limit

WORST_KEPT = 5
SEND_IDS = (
    "Measure again with a server that sends the ids of its tokens (return_token_ids): the check reads nothing else."
)
NO_LOOPS = "Measure text that does not loop (another model or --seed), or set void_rules.repetition_loop to note."
SAYS_LITTLE = "which says little about numerics (the gate `text` checks those)"

Text = tuple[Sequence[int], Sequence[int]]  # prompt ids, output ids


@dataclass(frozen=True)
class Scores:
    """What the reference thinks of one output: gap in logits [n] and its own choice [n].

    leads: its first logit − its second [n]; None where its tokens are known by construction.
    """

    gaps: NDArray[np.float64]
    preferred: NDArray[np.int64]
    leads: NDArray[np.float64] | None = None


class Scorer(Protocol):
    """The reference behind its cache, or a stand-in in tests."""

    name: str

    def scores(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Scores:
        """Gaps and choices at every output position."""

    def release(self) -> None:
        """Frees what is held in memory."""


@dataclass(frozen=True)
class _StreamCheck:
    stream: StreamRecord
    scores: Scores
    matches: int
    near_ties: int
    diverged_at: tuple[int, ...]
    is_truncated: bool
    loops: bool

    @property
    def positions(self) -> int:
        return len(self.scores.gaps)

    @property
    def divergences(self) -> int:
        return len(self.diverged_at)


def check_build(
    build: str,
    streams: Sequence[StreamRecord],
    prompts: Mapping[str, Sequence[int]],
    scorer: Scorer,
    *,
    tau: float,
    errors: RoundingErrors | None = None,
    max_divergence_rate: float = 0.0,
    end_token_ids: frozenset[int] = frozenset(),
    loops_void: bool = True,
    is_structured: bool = False,
) -> OutputOutcome:
    """Checks the ok, measured streams of one build; those are the ones a speed cell is made of.

    prompts: request_id → prompt ids. max_divergence_rate holds for every stream, so that one wholly wrong answer
    cannot hide among many right ones. end_token_ids: after which an output may end early, where the run allows it.
    errors: what bf16 does in the reference, which bounds the rate of near-ties; None where no token is ever near.
    loops_void: whether loops void the check or are only listed. is_structured: of the weights that were served.
    """
    sound = [s for s in streams if s.build == build and not s.is_warmup and s.status is StreamStatus.OK]
    if obstacle := _obstacle(sound, prompts):
        reason, remedy = obstacle
        return OutputOutcome(build=build, verdict=Verdict.VOID, reason=reason, remedy=remedy, reference=scorer.name)
    checks = [_check_stream(stream, prompts[stream.request_id], scorer, tau, end_token_ids) for stream in sound]
    truncated = tuple(check.stream.request_id for check in checks if check.is_truncated)
    loops = tuple(check.stream.request_id for check in checks if check.loops)
    near_tie_rate = _rate([check.near_ties for check in checks], checks)
    limit = near_tie_limit(errors, [check.scores.leads for check in checks], max_divergence_rate)
    complaint = limit.complaint(near_tie_rate) if limit else None
    looping = loops if loops_void else ()
    verdict, reason = _verdict(checks, truncated, complaint, looping, max_divergence_rate, is_structured)
    return OutputOutcome(
        build=build,
        verdict=verdict,
        reason=reason,
        remedy=NO_LOOPS if verdict is Verdict.VOID else "",
        reference=scorer.name,
        is_structured=is_structured,
        tau=tau,
        max_divergence_rate=max_divergence_rate,
        near_tie_rate=near_tie_rate,
        bf16_near_tie_rate=limit.bf16_rate if limit else None,
        max_near_tie_rate=limit.max_rate if limit else None,
        truncated=truncated,
        repetition_loops=loops,
        **_figures(checks),
    )


def _figures(checks: Sequence[_StreamCheck]) -> dict[str, Any]:
    """What was counted over all outputs, by its name in OutputOutcome."""
    gaps = np.concatenate([check.scores.gaps for check in checks])
    return {
        "streams": len(checks),
        "positions": len(gaps),
        "matches": sum(check.matches for check in checks),
        "near_ties": sum(check.near_ties for check in checks),
        "divergences": sum(check.divergences for check in checks),
        "worst_gap": float(gaps.max()) if np.isfinite(gaps).all() else None,
        "match_rate": _rate([check.matches for check in checks], checks),
        "divergence_rate": _rate([check.divergences for check in checks], checks),
        "worst": _worst(checks),
    }


def could_not_run(build: str, reason: str, remedy: str) -> OutputOutcome:
    """The outcome where there is no usable reference: never a pass."""
    return OutputOutcome(build=build, verdict=Verdict.INCONCLUSIVE, reason=reason, remedy=remedy)


def _obstacle(sound: Sequence[StreamRecord], prompts: Mapping[str, Sequence[int]]) -> tuple[str, str] | None:
    """Why these streams cannot be judged, and the remedy; None where they can."""
    unknown = [stream.request_id for stream in sound if stream.request_id not in prompts]
    if unknown:
        return f"the prompt of {unknown[0]} is not in the run", "Measure again: the run lost requests of its streams."
    if not any(stream.token_ids for stream in sound):
        return "there is no emitted token to check", SEND_IDS
    return None


def _check_stream(
    stream: StreamRecord, prompt: Sequence[int], scorer: Scorer, tau: float, end_token_ids: frozenset[int]
) -> _StreamCheck:
    output = stream.token_ids
    scores = scorer.scores(prompt, output) if output else Scores(np.empty(0), np.empty(0, dtype=np.int64))
    if len(scores.gaps) != len(output):
        raise ValueError(f"{len(scores.gaps)} scores for {len(output)} tokens")
    match = scores.gaps == 0
    near_tie = (scores.gaps > 0) & (scores.gaps <= tau)
    # Whatever is left diverged: above τ, below zero, or not a number.
    diverged_at = tuple(int(position) for position in np.flatnonzero(~(match | near_tie)))
    return _StreamCheck(
        stream=stream,
        scores=scores,
        matches=int(match.sum()),
        near_ties=int(near_tie.sum()),
        diverged_at=diverged_at,
        is_truncated=len(output) < stream.max_tokens and output[-1:] not in {(token,) for token in end_token_ids},
        loops=find_repetition_loop(output) is not None,
    )


def _verdict(
    checks: Sequence[_StreamCheck],
    truncated: Sequence[str],
    complaint: str | None,
    loops: Sequence[str],
    max_divergence_rate: float,
    is_structured: bool,
) -> tuple[Verdict, str]:
    wrong = [check for check in checks if check.divergences > max_divergence_rate * check.positions]
    if wrong:
        count = sum(check.divergences for check in wrong)
        first = min(wrong, key=lambda check: check.diverged_at[0])
        return Verdict.FAIL, (
            f"{len(wrong)} of {len(checks)} outputs hold tokens that the reference would not emit ({count} in all"
            f"{_beyond(max_divergence_rate)}), first at position {first.diverged_at[0]} of {first.stream.request_id}"
        )
    if truncated:
        return Verdict.FAIL, f"{len(truncated)} outputs are shorter than asked for, first {truncated[0]}"
    if complaint:
        return Verdict.FAIL, complaint
    if loops:
        return (
            Verdict.VOID,
            f"{len(loops)} outputs run in a repetition loop, first {loops[0]}: such speed means nothing",
        )
    return Verdict.PASS, _passed(sum(check.divergences for check in checks), max_divergence_rate, is_structured)


def _beyond(max_divergence_rate: float) -> str:
    return f", more than the {max_divergence_rate * 100:.4g} % a stream allowed" if max_divergence_rate else ""


def _passed(divergences: int, max_divergence_rate: float, is_structured: bool) -> str:
    right = f"the structured checkpoint's, {SAYS_LITTLE}"
    if not is_structured:
        right = "the reference's choice or a near-tie"
    if divergences:
        return f"{allowed_words(divergences, max_divergence_rate)}; every other emitted token is {right}"
    return f"every emitted token is {right}"


def _worst(checks: Sequence[_StreamCheck]) -> tuple[EmittedToken, ...]:
    found = [
        (_badness(check.scores.gaps[position]), check, int(position))
        for check in checks
        for position in np.flatnonzero(check.scores.gaps != 0)
    ]
    found.sort(key=lambda entry: -entry[0])
    return tuple(
        EmittedToken(
            request_id=check.stream.request_id,
            depth=check.stream.depth,
            position=position,
            emitted=check.stream.token_ids[position],
            preferred=int(check.scores.preferred[position]),
            gap=gap if math.isfinite(gap := float(check.scores.gaps[position])) else None,
        )
        for _, check, position in found[:WORST_KEPT]
    )


def _badness(gap: float) -> float:
    return float(gap) if math.isfinite(gap) else math.inf


def _rate(counts: Sequence[int], checks: Sequence[_StreamCheck]) -> Rate:
    return clustered_rate(counts, [check.positions for check in checks])
