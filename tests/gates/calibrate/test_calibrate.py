"""`calibrate`: the simulation's tables and --json contract, and an A/A made up with known noise."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from kernarc.gates.calibrate.calibrate import calibrate, found_noise, rule_of
from kernarc.gates.calibrate.noise import DESIGN_NOISE, NOISES
from kernarc.gates.calibrate.simulate import COVERAGE_LAUNCHES, POWER_EFFECTS, GateRule, simulate
from kernarc.gates.compare import Measured
from kernarc.gates.config import GateConfig
from kernarc.harness.run.records import RunManifest, StreamRecord, StreamStatus
from kernarc.reports.calibration_text import calibration_json, print_calibration, print_simulation, simulation_json

from ..conftest import started_second_takes

MakeStream = Callable[..., StreamRecord]
CONFIG = GateConfig(depths=(128, 256), requests_per_depth=30, looks=(5, 8))


def test_simulation_prints_its_tables_and_keeps_the_json_contract(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    noises = (DESIGN_NOISE, NOISES[4])
    found = simulate(GateRule(n_resamples=200), 100, 1, lambda done, total: seen.append((done, total)), noises)
    output = simulation_json(found)
    assert list(output) == ["false_alarm_rate", "coverage", "power", "comparisons"]
    assert list(output["coverage"]) == [str(launches) for launches in COVERAGE_LAUNCHES]
    assert [row["effect"] for row in output["power"]] == list(POWER_EFFECTS)
    assert output["comparisons"] == 100
    assert output["power"][-1]["detected"] == 1
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert json.loads(json.dumps(output)) == output
    print_simulation(found)
    text = capsys.readouterr().out
    assert "heavy tails" in text
    assert "largest share of false FAILs" in text


def a_with_a(make_stream: MakeStream, launch_noise: float, request_noise: float) -> list[StreamRecord]:
    rng = np.random.default_rng(3)
    streams = []
    for depth in (128, 256):
        for launch in range(12):
            luck = launch_noise * rng.normal()
            for request in range(30):
                place = {"depth": depth, "launch": launch, "request": request}
                streams.append(make_stream("a", step_ms=10.0, **place))
                slow = np.exp(luck + request_noise * rng.normal())
                streams.append(make_stream("b", step_ms=10.0 * slow, **place))
    return streams


def test_known_noise_is_found_in_an_a_with_a(
    make_stream: MakeStream, made_up_manifest: RunManifest, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = made_up_manifest.model_copy(update={"requests_per_depth": 30})
    found = calibrate(Measured(manifest, a_with_a(make_stream, 0.01, 0.03), 12), CONFIG)
    assert found.void_reasons == ()
    for depth in found.depths:
        assert depth.noise.launch == pytest.approx(0.01, rel=0.6)
        assert depth.noise.request == pytest.approx(0.03, rel=0.1)
        assert depth.detectable[0] > depth.detectable[1] > CONFIG.margin
    assert found.recommendations[0].launches is None or found.recommendations[0].launches > 5
    assert rule_of(CONFIG) == GateRule(depths=2, requests=30, looks=(5, 8))
    assert found_noise(found).request == found.loudest.noise.request
    assert set(calibration_json(found, (), ())) > {"false_alarm_rate", "coverage", "power", "comparisons", "noise"}
    print_calibration(found, (), CONFIG.looks, 30)
    text = capsys.readouterr().out
    assert "noise of this machine" in text
    assert "looks after 5, 8 launches, 30 requests a depth in each" in text
    assert "the gate removes it from estimates" in text
    assert f"`looks: [{found.recommendations[-1].launches}]`" in text


def test_start_order_is_a_component_and_hides_nothing(make_stream: MakeStream, made_up_manifest: RunManifest) -> None:
    """Whatever is started second takes 5 % longer: even launches start a, then b."""
    manifest = made_up_manifest.model_copy(update={"requests_per_depth": 30})
    streams = started_second_takes(a_with_a(make_stream, 0.01, 0.03), 1.05)
    found = calibrate(Measured(manifest, streams, 12), CONFIG)
    for depth in found.depths:
        assert depth.noise.order == pytest.approx(0.0488, abs=0.01)
        assert depth.noise.launch == pytest.approx(0.01, rel=0.6)
    assert found_noise(found).order == found.loudest.noise.order
    assert calibration_json(found, (), ())["noise"][0]["order"] == found.depths[0].noise.order


def test_two_launches_cannot_tell_start_order_apart(
    make_stream: MakeStream, made_up_manifest: RunManifest, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = made_up_manifest.model_copy(update={"requests_per_depth": 30})
    found = calibrate(Measured(manifest, a_with_a(make_stream, 0.01, 0.03), 2), CONFIG)
    assert [depth.noise.order for depth in found.depths] == [None, None]
    print_calibration(found, (), CONFIG.looks, 30)
    assert "it takes 4 launches to tell" in capsys.readouterr().out


def test_an_a_with_a_that_lost_a_pair_says_nothing(make_stream: MakeStream, made_up_manifest: RunManifest) -> None:
    manifest = made_up_manifest.model_copy(update={"requests_per_depth": 30})
    streams = a_with_a(make_stream, 0.01, 0.03)
    dead = streams[7].model_copy(update={"status": StreamStatus.VOID, "void_reason": "died"})
    found = calibrate(Measured(manifest, [*streams[:7], dead, *streams[8:]], 12), CONFIG)
    assert (found.depths, found.recommendations) == ((), ())
    assert "died" in found.void_reasons[0]
