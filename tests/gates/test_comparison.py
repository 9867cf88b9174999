"""From made-up records to the outcome, its words and its exit code."""

import pytest
from kernarc.gates.compare import seconds_a_launch
from kernarc.gates.config import GateConfig
from kernarc.gates.outcomes import Estimator, GateOutcome, Verdict
from kernarc.harness.run.records import RunManifest, StreamRecord, StreamStatus
from kernarc.reports.ci import junit, markdown

from ..fakes.comparisons import PASSED, checked, measured, outcome
from .conftest import MakeStream, made_up_run_manifest, started_second_takes


def test_equal_builds_pass(make_stream: MakeStream) -> None:
    found = outcome(measured(make_stream))
    assert (found.verdict, found.verdict.exit_code) == (Verdict.PASS, 0)
    assert found.sentence.startswith("PASS: b is nowhere slower per token than the margin of 1.0 %")
    assert [depth.pairs for depth in found.depths] == [20, 20]
    assert GateOutcome.model_validate_json(found.model_dump_json()) == found


def test_slower_step_fails_and_is_blamed_on_the_step(make_stream: MakeStream) -> None:
    found = outcome(measured(make_stream, 0.05))
    assert (found.verdict, found.verdict.exit_code) == (Verdict.FAIL, 1)
    for depth in found.depths:
        assert depth.point_estimate == pytest.approx(0.05, abs=0.005)
        assert depth.attribution is not None
        assert depth.attribution.step_effect == pytest.approx(0.05, abs=0.005)
        assert depth.attribution.acceptance_effect == pytest.approx(0, abs=1e-9)
        assert depth.words.endswith("the effect is from the step")
    assert "each step takes" in found.next_step


def test_fewer_accepted_drafts_are_blamed_on_acceptance(make_stream: MakeStream) -> None:
    """Half the tokens a step at equal step time: twice as slow, none of it the step's."""
    found = outcome(measured(make_stream, tokens=1))
    assert found.verdict is Verdict.FAIL
    depth = found.depths[0]
    assert depth.point_estimate == pytest.approx(1.0, abs=0.02)
    assert depth.attribution is not None
    assert depth.attribution.acceptance_effect == pytest.approx(1.0)
    assert abs(depth.attribution.step_effect) < 0.005
    assert depth.words.endswith("50.0 % fewer tokens a step: the effect is from the acceptance of drafts")


def test_improvement_is_noted(make_stream: MakeStream) -> None:
    found = outcome(measured(make_stream, -0.05))
    assert (found.verdict, found.improved_depths) == (Verdict.PASS, (128, 256))
    assert "IMPROVED at depth 128, 256" in found.sentence


def test_noise_is_inconclusive_and_says_how_many_launches(make_stream: MakeStream) -> None:
    found = outcome(measured(make_stream, noise=0.02))
    assert (found.verdict, found.verdict.exit_code) == (Verdict.INCONCLUSIVE, 3)
    assert found.launches_needed is not None
    assert f"--looks {found.launches_needed}`" in found.next_step


@pytest.mark.parametrize("effect", [0.0, 0.5])
def test_fewer_than_three_launches_decide_nothing(make_stream: MakeStream, effect: float) -> None:
    for launches in (1, 2):
        found = outcome(measured(make_stream, effect, launches=launches), launches=launches)
        assert found.verdict is Verdict.INCONCLUSIVE


def test_nothing_measured_is_void(make_stream: MakeStream) -> None:
    assert outcome([], launches=0).verdict is Verdict.VOID
    assert outcome([], launches=5).verdict is Verdict.VOID


def test_void_stream_missing_pair_and_outside_reason_void(make_stream: MakeStream) -> None:
    streams = measured(make_stream)
    dead = streams[1].model_copy(update={"status": StreamStatus.VOID, "void_reason": "engine died"})
    for found in (
        outcome([streams[0], dead, *streams[2:]]),
        outcome(streams[1:]),
        outcome(streams, void_reasons=["the engine b died"]),
    ):
        assert (found.verdict, found.verdict.exit_code) == (Verdict.VOID, 4)
        assert "void" in found.sentence


def test_without_an_output_check_nothing_passes(make_stream: MakeStream) -> None:
    unknown = checked("b", Verdict.INCONCLUSIVE, "an endpoint has no local weights")
    for checks in ((), (checked("a"),), (checked("a"), unknown), (checked("b"),)):
        found = outcome(measured(make_stream), checks)
        assert found.verdict is Verdict.INCONCLUSIVE
        assert "output was not checked" in found.sentence


@pytest.mark.parametrize("unjudged", ["a", "b"])
@pytest.mark.parametrize("verdict", [Verdict.INCONCLUSIVE, Verdict.VOID])
def test_what_to_do_where_an_output_could_not_be_judged_is_what_that_check_says(
    make_stream: MakeStream, unjudged: str, verdict: Verdict
) -> None:
    remedy = {"remedy": "Lower chunk_tokens."}
    checks = [checked(b, verdict).model_copy(update=remedy) if b == unjudged else checked(b) for b in "ab"]
    assert outcome(measured(make_stream), tuple(checks)).next_step == "Lower chunk_tokens."


def test_a_pass_on_structured_weights_does_not_call_the_output_right(make_stream: MakeStream) -> None:
    """An engine with a stale cache emits their tokens too."""
    assert "its output is right" in outcome(measured(make_stream)).sentence
    found = outcome(measured(make_stream), (checked("a"), PASSED[1].model_copy(update={"is_structured": True})))
    assert found.verdict is Verdict.PASS
    assert "right" not in found.sentence
    assert "the structured checkpoint's, which says little about numerics (the gate `text`" in found.sentence
    assert "`--config text`" in found.next_step


def test_a_pass_with_divergences_says_how_many_and_what_was_allowed(make_stream: MakeStream) -> None:
    allowed = PASSED[1].model_copy(update={"matches": 7, "divergences": 3, "max_divergence_rate": 0.3})
    found = outcome(measured(make_stream), (checked("a"), allowed))
    assert found.verdict is Verdict.PASS
    assert "its output holds 3 divergences, up to 30 % a stream allowed" in found.sentence
    assert "right" not in found.sentence
    assert "3 divergences, up to 30 % a stream allowed" in found.next_step


def test_wrong_output_fails_and_is_named_before_speed(make_stream: MakeStream) -> None:
    found = outcome(measured(make_stream, 0.05), (checked("a"), checked("b", Verdict.FAIL, "token 3 of r0")))
    assert found.verdict is Verdict.FAIL
    assert found.sentence == "FAIL: the output of b is wrong: token 3 of r0."


def test_wrong_baseline_voids(make_stream: MakeStream) -> None:
    found = outcome(measured(make_stream), (checked("a", Verdict.FAIL, "token 3"), checked("b")))
    assert found.verdict is Verdict.VOID
    assert "baseline" in found.sentence


def test_events_that_are_not_steps_are_said(make_stream: MakeStream) -> None:
    streams = [stream.model_copy(update={"events_are_steps": False}) for stream in measured(make_stream, 0.05)]
    found = outcome(streams)
    assert found.verdict is Verdict.FAIL
    assert found.depths[0].attribution is None
    assert "cannot be told apart" in found.depths[0].words


def test_start_order_is_taken_out_and_said(make_stream: MakeStream) -> None:
    """Five launches hold three of one order: plain means would keep a fifth of the 5 % and an interval of ± 15 %."""
    still, moved = measured(make_stream), started_second_takes(measured(make_stream), 0.95)
    found, same = outcome(moved), outcome(still)
    assert (found.verdict, found.estimator) == (Verdict.PASS, Estimator.CROSSOVER)
    for one, other in zip(found.depths, same.depths, strict=True):
        assert one.point_estimate == pytest.approx(other.point_estimate, abs=1e-6)
        assert one.high == pytest.approx(other.high, abs=1e-6)
        assert one.attribution is not None
        assert one.attribution.step_effect == pytest.approx(one.point_estimate)
        assert one.order_effect is not None
        assert one.order_effect.effect == pytest.approx(-0.05, abs=0.003)
        assert one.order_effect.low is not None
        assert one.order_effect.low < one.order_effect.effect
    assert found.order_words.startswith("The engine started second in a launch ran 5.")
    assert " % faster (−5." in found.order_words
    assert found.order_words.endswith("removed from the estimate.")
    assert found.order_words in markdown(found)
    assert "taken out (crossover)" in markdown(found)
    assert same.order_words == ""
    assert GateOutcome.model_validate_json(found.model_dump_json()) == found


def with_endpoints(*names: str) -> RunManifest:
    manifest = made_up_run_manifest()
    builds = (
        build.model_copy(update={"engine": "endpoint"}) if build.name in names else build for build in manifest.builds
    )
    return manifest.model_copy(update={"builds": tuple(builds)})


@pytest.mark.parametrize("names", ["a", "b", "ab"])
@pytest.mark.parametrize("effect", [-0.2, 0.0, 0.2])
def test_repeats_of_one_start_decide_nothing_on_speed(make_stream: MakeStream, names: str, effect: float) -> None:
    """The same streams PASS, or FAIL, where both engines were started for every launch."""
    streams = measured(make_stream, effect)
    assert outcome(streams).verdict is (Verdict.FAIL if effect > 0 else Verdict.PASS)
    found = outcome(streams, manifest=with_endpoints(*names))
    assert (found.verdict, found.verdict.exit_code, found.speed_verdict.value) == (
        Verdict.INCONCLUSIVE,
        3,
        "INCONCLUSIVE",
    )
    assert (found.improved_depths, found.launches_needed, found.not_restarted) == ((), None, tuple(names))
    assert found.depths[0].point_estimate == pytest.approx(effect, abs=0.01)
    assert "not restarted between launches" in found.sentence
    assert "Let the tool start both engines" in found.next_step
    assert 'failures="0"' in junit(found)
    assert "IMPROVED" not in markdown(found)


def test_wrong_output_of_an_endpoint_fails_whatever_its_speed(make_stream: MakeStream) -> None:
    checks = (checked("a"), checked("b", Verdict.FAIL, "token 3 of r0"))
    assert outcome(measured(make_stream), checks, manifest=with_endpoints("b")).verdict is Verdict.FAIL
    wrong_baseline = (checked("a", Verdict.FAIL, "token 3"), checked("b"))
    assert outcome(measured(make_stream), wrong_baseline, manifest=with_endpoints("b")).verdict is Verdict.VOID


def test_engines_that_we_do_not_start_keep_the_plain_formulas(make_stream: MakeStream) -> None:
    found = outcome(measured(make_stream), manifest=with_endpoints("a", "b"))
    assert found.estimator is Estimator.LAUNCH_MEAN
    assert [depth.order_effect for depth in found.depths] == [None, None]
    assert "which engine was started first is not taken out" in markdown(found)


def with_control(make_stream: MakeStream, slow_blocks: set[tuple[int, int, int]]) -> list[StreamRecord]:
    streams = measured(make_stream)
    for depth in (128, 256):
        for launch in range(5):
            for request in range(4):
                block = request // 2 + (depth == 256) * 10
                slow = 1.2 if (depth, launch, block) in slow_blocks else 1.0
                streams.append(
                    make_stream("c", depth=depth, launch=launch, request=request, block=block, step_ms=10 * slow)
                )
    return [
        stream.model_copy(update={"block": stream.block + 10 * (stream.depth == 256)})
        if stream.build != "c"
        else stream
        for stream in streams
    ]


CONTROLLED = GateConfig(depths=(128, 256), looks=(5,), n_resamples=1000, control="c")
THREE = made_up_run_manifest(("a", "b", "c"))


def test_a_block_whose_control_drifted_does_not_count(make_stream: MakeStream) -> None:
    found = outcome(with_control(make_stream, {(128, 2, 1)}), config=CONTROLLED, manifest=THREE)
    assert found.verdict is Verdict.PASS
    assert [depth.pairs for depth in found.depths] == [18, 20]


def test_a_control_whose_text_is_accepted_less_in_a_block_did_not_drift(make_stream: MakeStream) -> None:
    """Half the tokens a step at equal step time: the text's doing, not the machine's."""
    streams = [
        make_stream(
            "c", depth=s.depth, launch=s.launch, request=int(s.request_id[-1]), block=s.block, tokens_per_step=1
        )
        if s.build == "c" and (s.launch, s.block) == (2, 1)
        else s
        for s in with_control(make_stream, set())
    ]
    found = outcome(streams, config=CONTROLLED, manifest=THREE)
    assert [depth.pairs for depth in found.depths] == [20, 20]


def test_a_control_that_drifts_too_often_voids(make_stream: MakeStream) -> None:
    slow = {(128, launch, 1) for launch in range(5)}
    found = outcome(with_control(make_stream, slow), config=CONTROLLED, manifest=THREE)
    assert found.verdict is Verdict.VOID
    assert "control build c drifted" in found.sentence


def test_a_control_that_was_not_measured_voids(make_stream: MakeStream) -> None:
    assert outcome(measured(make_stream), config=CONTROLLED).verdict is Verdict.VOID
    assert outcome(measured(make_stream), config=CONTROLLED, manifest=THREE).verdict is Verdict.VOID


def test_seconds_a_launch(make_stream: MakeStream) -> None:
    """Streams of 0.1 s wait and 10 steps of 10 ms."""
    assert seconds_a_launch([make_stream(launch=0), make_stream(launch=1)], ()) == pytest.approx(0.2)
    assert seconds_a_launch([], ()) is None
