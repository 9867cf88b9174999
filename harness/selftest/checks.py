"""Truth against measured: what a selftest row says, and why it fails."""

import hashlib
from collections.abc import Iterator

from ..client.completion import StreamOutcome
from ..client.metrics import NS_PER_MS, step_ms, tpot_ms, ttft_ms
from ..run.records import StreamStatus
from .conformance.case import Case
from .conformance.render import token_id, token_text
from .conformance.shape import Break
from .conformance.truth import Truth, percentile
from .play import Played
from .table import CaseRow, Figures, TimingRow

MAX_TPOT_ERROR = 0.001
MAX_STAMP_ERROR_MS = 0.3  # of one stamp; what a time per token may be off by beyond MAX_TPOT_ERROR in a short stream
MAX_TTFT_ERROR_MS = 1.0
MAX_STEADY_TPOT_ERROR = 0.005
MAX_OWN_US_PER_STEP = 20.0  # CPU time beyond what merely receiving costs
MIN_STEPS_TO_COST = 1000  # so many that what a stream costs once does not count
GIVE_UP_SLACK_S = 1.0  # a limit of x s must end a stream within x + this


def case_row(case: Case, played: Played, attempt: int) -> CaseRow:
    """Judges one run of a case."""
    outcome, truth = played.outcomes[-1], played.truths[-1] if played.truths else None
    wrong = list(_void_mismatches(case, played) if case.void else _usable_mismatches(case, played))
    late = [] if case.void or truth is None else list(_time_mismatches(case, outcome, truth))
    return CaseRow(
        case=case.name,
        says=case.says,
        threads=case.threads,
        truth=_true_figures(case, outcome, truth),
        measured=_measured_figures(outcome),
        passed=not wrong and not late,
        attempts=attempt,
        mismatches=(*wrong, *late),
        missed_by_time_alone=bool(late) and not wrong,
    )


def timing_row(case: Case, played: Played, attempt: int) -> TimingRow:
    """Judges one steady stream event by event."""
    outcome, truth = played.outcomes[-1], played.truths[-1]
    wrong = list(_usable_mismatches(case, played))
    errors_ms = sorted(
        (event.t_ns - true.written_ns) / NS_PER_MS for event, true in zip(outcome.events, truth.events, strict=False)
    )
    steps = max(1, len(outcome.events))
    process_us = outcome.process_ns / 1000 / steps
    bare_us = None if played.bare_recv_ns is None else played.bare_recv_ns / 1000 / max(1, len(truth.events))
    measured, true_tpot = tpot_ms(outcome), truth.tpot_ms
    tpot_error = measured / true_tpot - 1 if measured and true_tpot else None
    p99_ms = percentile(errors_ms, 0.99)
    late = [] if errors_ms and tpot_error is not None else ["nothing to time"]
    if p99_ms is not None and p99_ms >= MAX_STAMP_ERROR_MS:
        late.append(f"99 % of the stamps are up to {p99_ms:.3f} ms late, the limit is {MAX_STAMP_ERROR_MS} ms")
    if tpot_error is not None and abs(tpot_error) >= MAX_STEADY_TPOT_ERROR:
        late.append(f"the time per token is {tpot_error:+.2%} off, the limit is {MAX_STEADY_TPOT_ERROR:.1%}")
    if bare_us is not None and steps >= MIN_STEPS_TO_COST and process_us - bare_us >= MAX_OWN_US_PER_STEP:
        late.append(
            f"a step costs {process_us:.1f} µs of CPU time, {process_us - bare_us:.1f} µs more than receiving it, "
            f"the limit is {MAX_OWN_US_PER_STEP:g} µs"
        )
    return TimingRow(
        case=case.name,
        ms_per_token=case.shape.ms_per_token,
        prompt_tokens=case.prompt_tokens,
        events=len(errors_ms),
        median_error_ms=percentile(errors_ms, 0.5),
        p99_error_ms=p99_ms,
        wake_p99_ms=percentile(sorted(lag_ns / NS_PER_MS for lag_ns in outcome.lags_ns), 0.99),
        server_jitter_p99_ms=percentile(truth.jitter_ms(), 0.99),
        tpot_error=tpot_error,
        process_us_per_step=process_us,
        reading_us_per_step=outcome.reading_ns / 1000 / steps,
        bare_recv_us_per_step=bare_us,
        stamped_by=outcome.stamped_by,
        passed=not wrong and not late,
        attempts=attempt,
        mismatches=(*wrong, *late),
        missed_by_time_alone=bool(late) and not wrong,
    )


def _measured_figures(outcome: StreamOutcome) -> Figures:
    return Figures(
        is_usable=outcome.status is StreamStatus.OK,
        tokens=sum(event.num_tokens for event in outcome.events),
        ttft_ms=ttft_ms(outcome),
        tpot_ms=tpot_ms(outcome),
        step_ms=step_ms(outcome),
        void_reason=outcome.void_reason,
    )


def _true_figures(case: Case, outcome: StreamOutcome, truth: Truth | None) -> Figures:
    if truth is None:
        return Figures(is_usable=case.void is None, tokens=0, void_reason=case.void)
    first_ns = truth.first_written_ns
    return Figures(
        is_usable=case.void is None,
        tokens=truth.tokens,
        ttft_ms=None if first_ns is None else (first_ns - outcome.sent_ns) / NS_PER_MS,
        tpot_ms=truth.tpot_ms,
        step_ms=truth.step_ms if case.knows_steps else None,
        void_reason=case.void,
    )


def _usable_mismatches(case: Case, played: Played) -> Iterator[str]:
    """Everything but times: counts, ids, text, depth, connections."""
    outcome, shape = played.outcomes[-1], case.shape
    for number, each in enumerate(played.outcomes, start=1):
        if each.status is not StreamStatus.OK:
            yield f"request {number} is void: {each.void_reason}"
    if len(played.truths) != case.requests:
        yield f"the server saw {len(played.truths)} requests, {case.requests} were to be sent"
        return
    truth = played.truths[-1]
    tokens = sum(event.num_tokens for event in outcome.events)
    if tokens != truth.tokens:
        yield f"{tokens} tokens, the server sent {truth.tokens}"
    if shape.sends_ids and outcome.token_ids != tuple(token_id(shape, j) for j in range(truth.tokens)):
        yield "the ids are not those that were sent"
    if outcome.text != "".join(token_text(shape, j) for j in range(truth.tokens)):
        yield "the text is not the one that was sent"
    yield from _prompt_mismatches(case, played, truth)
    if len(outcome.refusals) != len(case.refusals):
        yield f"{len(outcome.refusals)} refusals are noted, there were {len(case.refusals)}"
    if case.closes_after_answer and any(each.connect_ns == 0 for each in played.outcomes):
        yield "a closed connection was taken for an open one"


def _prompt_mismatches(case: Case, played: Played, truth: Truth) -> Iterator[str]:
    prompt_ids = played.request.prompt_ids
    if prompt_ids and truth.prompt_sha256 != hashlib.sha256(",".join(map(str, prompt_ids)).encode()).hexdigest():
        yield "the server read another prompt than was to be sent"
    if truth.prompt_tokens != case.prompt_tokens:
        yield f"the server read {truth.prompt_tokens} prompt tokens, {case.prompt_tokens} were to be sent"


def _void_mismatches(case: Case, played: Played) -> Iterator[str]:
    outcome = played.outcomes[-1]
    reason = outcome.void_reason or ""
    if outcome.status is not StreamStatus.VOID:
        yield "taken as usable, it is void"
    elif case.void and case.void not in reason:
        yield f"void, but for another reason: {reason}"
    if any(each.status is not StreamStatus.OK for each in played.outcomes[:-1]):
        yield "an earlier request is void, only the last is"
    if not case.refusals and len(played.truths) > case.requests:
        yield f"the server saw {len(played.truths)} requests, {case.requests} were sent: one was sent twice"
    limit_s = (
        case.stall_limit_s
        if case.shape.breaks in (Break.STALL, Break.PINGS, Break.EMPTY_EVENTS, Break.DRIP)
        else case.stream_limit_s
    )
    took_s = (outcome.ended_ns - outcome.sent_ns) / 1e9
    if took_s > limit_s + GIVE_UP_SLACK_S:
        yield f"given up after {took_s:.2f} s, the limit is {limit_s:g} s"


def _time_mismatches(case: Case, outcome: StreamOutcome, truth: Truth) -> Iterator[str]:
    measured, true = _measured_figures(outcome), _true_figures(case, outcome, truth)
    if not measured.is_usable:
        return
    limit_ms = MAX_TTFT_ERROR_MS + truth.events[0].doubt_ms
    if measured.ttft_ms is None or true.ttft_ms is None or abs(measured.ttft_ms - true.ttft_ms) > limit_ms:
        yield f"time to first token {measured.ttft_ms} ms, the truth is {true.ttft_ms} ms"
    yield from _rate_mismatch("time per token", measured.tpot_ms, true.tpot_ms, truth)
    yield from _rate_mismatch("time per step", measured.step_ms, true.step_ms, truth)


def _rate_mismatch(name: str, measured_ms: float | None, true_ms: float | None, truth: Truth) -> Iterator[str]:
    if measured_ms is None or true_ms is None:
        if measured_ms is not true_ms:
            yield f"{name} {measured_ms}, the truth is {true_ms}"
        return
    decode_ms = (truth.events[-1].written_ns - truth.events[0].written_ns) / NS_PER_MS
    doubt_ms = truth.events[0].doubt_ms + truth.events[-1].doubt_ms
    limit = max(MAX_TPOT_ERROR, (MAX_STAMP_ERROR_MS + doubt_ms) / decode_ms)
    if not abs(measured_ms / true_ms - 1) <= limit:
        yield f"{name} {measured_ms:.4f} ms, the truth is {true_ms:.4f} ms: more than {limit:.2%} apart"
