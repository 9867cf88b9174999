"""The selftest fails every wrong client, and says why: the known faults, played on right outcomes."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from click.testing import CliRunner
from kernarc.harness.client.completion import CompletionRequest, StreamOutcome
from kernarc.harness.errors import ConfigError
from kernarc.harness.run.records import StreamStatus, TokenEvent, Usage
from kernarc.harness.selftest.checks import case_row, timing_row
from kernarc.harness.selftest.conformance.cases import CASES
from kernarc.harness.selftest.conformance.render import token_id, token_text
from kernarc.harness.selftest.conformance.truth import Truth, TruthEvent
from kernarc.harness.selftest.play import Played
from kernarc.harness.selftest.selftest import run_selftest
from kernarc.harness.selftest.table import SelftestReport, lines
from kernarc.reports.commands.machine import selftest

NO_PROMPT_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
Wrong = Callable[[StreamOutcome], StreamOutcome]


def ideal(name: str, stamp_error_ns: int = 0) -> Played:
    """What a perfect client brings back of a case that a perfect server played."""
    case = CASES[name]
    shape = case.shape
    spans = list(shape.events(shape.tokens))
    true = tuple(TruthEvent(round(ms * 1e6), round(ms * 1e6), size, round(ms * 1e6)) for _, size, ms in spans)
    events = tuple(
        TokenEvent(
            t_ns=round(ms * 1e6) + stamp_error_ns,
            token_ids=tuple(token_id(shape, at + i) for i in range(size)),
            text="".join(token_text(shape, at + i) for i in range(size)),
        )
        for at, size, ms in spans
    )
    outcome = StreamOutcome(
        sent_ns=0,
        connect_ns=1,
        ended_ns=events[-1].t_ns,
        wall_utc="",
        events=events,
        events_are_steps=case.knows_steps,
        usage=Usage(prompt_tokens=case.prompt_tokens, completion_tokens=shape.tokens),
        finish_reason="length",
        status=StreamStatus.OK,
    )
    truth = Truth(name, 0, case.prompt_tokens, NO_PROMPT_SHA256, true)
    return Played(CompletionRequest(prompt_tokens=case.prompt_tokens), (outcome,), (truth,))


def spoilt(played: Played, wrong: Wrong) -> Played:
    return replace(played, outcomes=tuple(wrong(outcome) for outcome in played.outcomes))


def counts_chunks(outcome: StreamOutcome) -> StreamOutcome:
    return replace(outcome, events=tuple(e.model_copy(update={"token_ids": e.token_ids[:1]}) for e in outcome.events))


def takes_the_first_for_sent(outcome: StreamOutcome) -> StreamOutcome:
    first = outcome.events[0].model_copy(update={"t_ns": outcome.sent_ns})
    return replace(outcome, events=(first, *outcome.events[1:]))


def stamps_late(outcome: StreamOutcome) -> StreamOutcome:
    last = outcome.events[-1]
    return replace(outcome, events=(*outcome.events[:-1], last.model_copy(update={"t_ns": last.t_ns + 5_000_000})))


def loses_a_space(outcome: StreamOutcome) -> StreamOutcome:
    first = outcome.events[0]
    return replace(outcome, events=(first.model_copy(update={"text": first.text.strip()}), *outcome.events[1:]))


def loses_the_last(outcome: StreamOutcome) -> StreamOutcome:
    return replace(outcome, events=outcome.events[:-1])


def calls_flushes_steps(outcome: StreamOutcome) -> StreamOutcome:
    return replace(outcome, events_are_steps=True)


def is_void(outcome: StreamOutcome) -> StreamOutcome:
    return replace(outcome, status=StreamStatus.VOID, void_reason="for no reason")


def row_of(name: str, played: Played) -> tuple[bool, tuple[str, ...]]:
    row = case_row(CASES[name], played, 1)
    return row.passed, row.mismatches


@pytest.mark.parametrize("name", ["chunks-1", "chunks-7", "mixed-steps", "first-chunk-of-5", "flush-20-in-20-writes"])
def test_a_perfect_client_passes(name: str) -> None:
    assert row_of(name, ideal(name, stamp_error_ns=50_000)) == (True, ())


@pytest.mark.parametrize(
    ("name", "wrong", "why"),
    [
        ("chunks-4", counts_chunks, "64 tokens, the server sent 256"),
        ("slow-first-token", takes_the_first_for_sent, "time per token 44"),
        ("role-chunk", takes_the_first_for_sent, "time to first token 0.0 ms, the truth is 2000.0 ms"),
        ("chunks-1", stamps_late, "more than 0.10% apart"),
        ("cut-json", loses_a_space, "the text is not the one"),
        ("usage-beside", loses_the_last, "63 tokens, the server sent 64"),
        ("flush-20-as-one-event", calls_flushes_steps, "time per step"),
        ("flush-20-in-20-writes", calls_flushes_steps, "time per step"),
        ("crlf", is_void, "request 1 is void: for no reason"),
    ],
)
def test_a_wrong_client_fails(name: str, wrong: Wrong, why: str) -> None:
    passed, mismatches = row_of(name, spoilt(ideal(name), wrong))
    assert not passed
    assert why in " ".join(mismatches)


@pytest.mark.parametrize("name", ["error-in-stream", "usage-lies", "cached-prefix", "repetition-loop"])
def test_taking_a_void_stream_for_good_fails(name: str) -> None:
    passed, mismatches = row_of(name, ideal(name))
    assert not passed
    assert mismatches[0] == "taken as usable, it is void"


def test_a_void_for_another_reason_fails() -> None:
    assert not row_of("usage-lies", spoilt(ideal("usage-lies"), is_void))[0]


def test_sending_a_request_twice_fails() -> None:
    played = ideal("close-without-answer")
    twice = replace(
        spoilt(played, lambda o: replace(o, status=StreamStatus.VOID, void_reason="closed without an answer")),
        truths=played.truths * 2,
    )
    assert "one was sent twice" in row_of("close-without-answer", twice)[1][0]


@pytest.mark.parametrize(("error_ns", "passes"), [(250_000, True), (350_000, False)])
def test_a_timing_row_reports_the_error_that_was_made(error_ns: int, passes: bool) -> None:
    row = timing_row(CASES["steady-1ms"], ideal("steady-1ms", error_ns), 1)
    assert row.median_error_ms == pytest.approx(error_ns / 1e6)
    assert row.p99_error_ms == pytest.approx(error_ns / 1e6)
    assert row.tpot_error == pytest.approx(0.0, abs=1e-9)
    assert row.passed is passes


@pytest.mark.parametrize(("own_us", "passes"), [(19.9, True), (20.1, False)])
def test_a_timing_row_fails_where_a_step_costs_too_much_beyond_receiving_it(own_us: float, passes: bool) -> None:
    played = ideal("steady-1ms")
    steps = len(played.truths[-1].events)
    costly = spoilt(played, lambda outcome: replace(outcome, process_ns=round((10 + own_us) * 1000 * steps)))
    row = timing_row(CASES["steady-1ms"], replace(costly, bare_recv_ns=10_000 * steps), 1)
    assert row.passed is passes
    assert row.bare_recv_us_per_step == 10.0


def test_a_timing_row_without_a_stream_fails() -> None:
    played = ideal("steady-1ms")
    row = timing_row(CASES["steady-1ms"], spoilt(played, lambda o: replace(is_void(o), events=())), 1)
    assert (row.passed, row.missed_by_time_alone, row.p99_error_ms) == (False, False, None)


def test_chunk_sizes_give_one_time_per_token_within_a_thousandth() -> None:
    rows = [case_row(CASES[f"chunks-{n}"], ideal(f"chunks-{n}"), 1) for n in range(1, 17)]
    times = [row.measured.tpot_ms for row in rows]
    assert all(later == pytest.approx(earlier, rel=1e-3) for earlier, later in pairwise(times))


def test_an_unknown_case_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no selftest case 'stal'") as error:
        run_selftest(["stal"])
    assert "did you mean 'stall'?" in error.value.hint


def test_an_empty_report_is_no_pass() -> None:
    assert SelftestReport((), (), 0.0).exit_code == 4


def test_the_report_shows_verdicts_and_what_to_do() -> None:
    good = case_row(CASES["chunks-1"], ideal("chunks-1"), 1)
    late = case_row(CASES["chunks-1"], spoilt(ideal("chunks-1"), stamps_late), 3)
    text = "\n".join(lines(SelftestReport((good, late), (), 1.0)))
    assert "pass chunks-1" in text
    assert "FAIL chunks-1" in text
    assert "(3 tries)" in text
    assert "kernarc-gate selftest --case chunks-1" in text


def test_the_command_prints_one_object_and_its_verdict() -> None:
    result = CliRunner().invoke(selftest, ["--json", "--case", "cached-prefix", "--case", "half-event"])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["passed"]) == (0, True)
    assert [row["case"] for row in report["cases"]] == ["cached-prefix", "half-event"]
    assert set(report["cases"][0]) == {
        "case",
        "says",
        "threads",
        "truth",
        "measured",
        "passed",
        "attempts",
        "mismatches",
        "missed_by_time_alone",
    }
