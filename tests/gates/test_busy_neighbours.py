"""Streams slowed by a neighbour's engine: a straggler is borne, more than a small share is void, whoever it favours."""

from collections.abc import Callable
from typing import Any

import pytest
from kernarc.gates.compare import Measured, evaluate
from kernarc.gates.config import GateConfig
from kernarc.gates.outcomes import GateOutcome, OutputOutcome, Verdict
from kernarc.gates.words import with_words
from kernarc.harness.run.records import StreamRecord
from kernarc.reports.ci import junit, markdown

from .conftest import made_up_run_manifest

MakeStream = Callable[..., StreamRecord]
CONFIG = GateConfig(depths=(128, 256), looks=(5, 8), n_resamples=1000)
REQUESTS = 20  # a depth and launch: 2 of the first look's 100 streams a depth are 2 %


def streams_with(
    make_stream: MakeStream, crowded: set[tuple[str, int, int, int]], *, launches: int = 5
) -> list[StreamRecord]:
    """Equal builds, (build, depth, launch, request) in `crowded` begun beside the other, its times as they were."""
    streams = []
    for build in "ab":
        for depth in (128, 256):
            for launch in range(launches):
                for request in range(REQUESTS):
                    step_ms = 10 + 0.001 * (len(streams) % 7)
                    stream = make_stream(build, depth=depth, launch=launch, request=request, step_ms=step_ms)
                    is_crowded = (build, depth, launch, request) in crowded
                    busy = ("ba"["ab".index(build)],) if is_crowded else ()
                    streams.append(stream.model_copy(update={"busy_neighbours": busy}))
    return streams


def outcome(streams: list[StreamRecord], *, launches: int = 5, **changes: Any) -> GateOutcome:
    manifest = made_up_run_manifest().model_copy(update={"requests_per_depth": REQUESTS})
    checks = changes.pop("checks", tuple(_checked(build) for build in "ab"))
    return with_words(evaluate(Measured(manifest, streams, launches), changes.pop("config", CONFIG), checks))


def _checked(build: str, verdict: Verdict = Verdict.PASS) -> OutputOutcome:
    return OutputOutcome(build=build, verdict=verdict, reason="token 3", positions=10, matches=10, worst_gap=0.0)


@pytest.mark.parametrize("build", ["a", "b"])
def test_stragglers_are_borne_and_more_are_void(make_stream: MakeStream, build: str) -> None:
    """2 of the 100 streams of a depth are 2 %, 3 are more; two depths with 2 each are 2 % too."""
    two = {(build, 128, 0, 3), (build, 128, 4, 7)}
    assert outcome(streams_with(make_stream, two)).verdict is Verdict.PASS
    assert outcome(streams_with(make_stream, two | {(build, 256, 0, 3), (build, 256, 1, 3)})).verdict is Verdict.PASS
    found = outcome(streams_with(make_stream, two | {(build, 128, 2, 0)}))
    assert (found.verdict, found.verdict.exit_code) == (Verdict.VOID, 4)
    other = "b" if build == "a" else "a"
    reason = f"3 of 200 streams of {build} were measured while the engine of {other} was using the processor"
    assert found.void_reasons == (reason,)
    assert reason in found.sentence
    assert "`residency: alternate`" in found.next_step
    assert GateOutcome.model_validate_json(found.model_dump_json()) == found


def test_one_straggler_never_voids_however_few_the_streams(make_stream: MakeStream) -> None:
    crowded = streams_with(make_stream, {("a", 128, 0, 0)}, launches=3)
    few = [stream for stream in crowded if stream.request_id[-2:] == "r0"]
    manifest = made_up_run_manifest().model_copy(update={"requests_per_depth": 1})
    config = GateConfig(depths=(128, 256), looks=(3,), n_resamples=1000)
    assert evaluate(Measured(manifest, few, 3), config).void_reasons == ()


def test_an_early_launch_is_judged_by_what_the_first_look_will_hold(make_stream: MakeStream) -> None:
    """2 of a first launch's 20 streams are 10 % of them and 2 % of the look's 100; 3 cannot get below that."""
    two = {("a", 128, 0, 0), ("a", 128, 0, 1)}
    assert outcome(streams_with(make_stream, two, launches=1), launches=1).void_reasons == ()
    three = two | {("a", 128, 0, 2)}
    assert outcome(streams_with(make_stream, three, launches=1), launches=1).verdict is Verdict.VOID


def test_warm_ups_and_launches_that_do_not_count_yet_void_nothing(make_stream: MakeStream) -> None:
    later = streams_with(make_stream, {("a", 128, 5, request) for request in range(REQUESTS)}, launches=6)
    assert outcome(later).verdict is Verdict.PASS
    warmups = [
        make_stream("a", request=request, is_warmup=True).model_copy(update={"busy_neighbours": ("b",)})
        for request in range(5)
    ]
    assert outcome([*warmups, *streams_with(make_stream, set())]).verdict is Verdict.PASS


def test_nothing_in_a_void_comparison_reads_as_a_pass_or_an_improvement(make_stream: MakeStream) -> None:
    """Half the time a token in every pair, because the baseline was measured beside a candidate that never rests."""
    crowded = {("a", depth, launch, request) for depth in (128, 256) for launch in range(5) for request in range(20)}
    slowed = [
        make_stream(
            "a", depth=s.depth, launch=s.launch, request=int(s.request_id.split("r")[1]), step_ms=20
        ).model_copy(update={"busy_neighbours": s.busy_neighbours})
        if s.build == "a"
        else s
        for s in streams_with(make_stream, crowded)
    ]
    found = outcome(slowed)
    assert found.depths[0].point_estimate == pytest.approx(-0.5, abs=0.01)
    assert (found.verdict, found.improved_depths) == (Verdict.VOID, ())
    assert "| 128 | VOID |" in markdown(found)
    assert "IMPROVED" not in markdown(found)
    assert 'errors="3"' in junit(found)  # the verdict and both depths


def test_wrong_output_fails_beside_a_busy_neighbour_too(make_stream: MakeStream) -> None:
    crowded = streams_with(make_stream, {("a", 128, 0, request) for request in range(5)})
    found = outcome(crowded, checks=(_checked("a"), _checked("b", Verdict.FAIL)))
    assert found.verdict is Verdict.FAIL
