"""The time to first token: told with its interval, in the sentence where it is later for sure, and never judged."""

import pytest
from kernarc.gates.outcomes import GateOutcome, Verdict
from kernarc.harness.run.records import StreamRecord
from kernarc.reports.ci import markdown

from ..fakes.comparisons import measured, outcome
from .conftest import MakeStream


def first_token_at(streams: list[StreamRecord], wait_ms: dict[str, float], depth: int = 256) -> list[StreamRecord]:
    """The same streams, but at one depth every build's first token comes wait_ms after the request."""

    def moved(stream: StreamRecord) -> StreamRecord:
        sent_ns = stream.events[0].t_ns - round(wait_ms[stream.build] * 1e6)
        return stream.model_copy(update={"sent_ns": sent_ns}) if stream.depth == depth else stream

    return [moved(stream) for stream in streams]


def test_a_later_first_token_is_told_and_not_judged(make_stream: MakeStream) -> None:
    """310 ms where it were 100: not a word less about the time per token, and no word that all is well."""
    found = outcome(first_token_at(measured(make_stream), {"a": 100.0, "b": 310.0}))
    same, late = found.depths
    assert found.verdict is Verdict.PASS
    assert same.first_token is not None
    assert same.first_token.effect == pytest.approx(0)
    assert late.first_token is not None
    assert (late.first_token.low, late.first_token.high) == (pytest.approx(2.1), pytest.approx(2.1))
    assert found.sentence.endswith("its output is right; first token 3.1x later at depth 256: not gated.")
    assert found.next_step == "The change may go in if you accept its later first token."
    assert "(not gated): ×1.00 (1.00–1.00) at depth 128, ×3.10 (3.10–3.10) at depth 256." in markdown(found)
    assert GateOutcome.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("wait_ms", "said"), [(100.9, ""), (90.0, ""), (104.0, "first token 4.0 % later at depth 256")]
)
def test_a_first_token_is_in_the_sentence_only_beyond_the_margin(
    make_stream: MakeStream, wait_ms: float, said: str
) -> None:
    found = outcome(first_token_at(measured(make_stream), {"a": 100.0, "b": wait_ms}))
    assert said in found.sentence
    assert ("first token" in found.sentence) is bool(said)


def test_a_first_token_that_spreads_over_the_margin_is_not_called_later(make_stream: MakeStream) -> None:
    """Three launches at 3 %, two at −1 %: the mean lies above the margin, its interval does not."""
    streams = first_token_at(measured(make_stream), {"a": 100.0, "b": 103.0})
    early = first_token_at(measured(make_stream), {"a": 100.0, "b": 99.0})
    mixed = [late if late.launch < 3 else soon for late, soon in zip(streams, early, strict=True)]
    found = outcome(mixed)
    assert found.depths[1].first_token is not None
    assert found.depths[1].first_token.effect > 0.01
    assert "first token" not in found.sentence


def test_a_slower_candidate_is_also_said_to_start_later(make_stream: MakeStream) -> None:
    found = outcome(first_token_at(measured(make_stream, 0.05), {"a": 100.0, "b": 310.0}))
    assert found.verdict is Verdict.FAIL
    assert "slower per token" in found.sentence
    assert found.sentence.endswith("first token 3.1x later at depth 256: not gated.")
