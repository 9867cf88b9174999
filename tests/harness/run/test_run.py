"""A run measures what it planned, in order, against engines of known speed, and voids what may not count."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from kernarc.harness.client.metrics import step_ms, tokens_per_step, tpot_ms
from kernarc.harness.config.builds import Build, resolve_build
from kernarc.harness.config.models import MeasurementConfig, VoidRulesConfig
from kernarc.harness.errors import ConfigError, EngineError
from kernarc.harness.run.plan import RunPlan
from kernarc.harness.run.progress import RunObserver
from kernarc.harness.run.records import RunManifest, StreamRecord, StreamStatus
from kernarc.harness.run.run import Run
from kernarc.harness.run.storage import RunDirectory
from kernarc.harness.selftest.conformance.process import ConformanceServer

MakeBuild = Callable[..., Build]
MAX_TOKENS = 17


class Told(RunObserver):
    """Calls back after each measured stream."""

    def __init__(self, stream_done: Callable[[StreamRecord], object]) -> None:
        self.stream_done = stream_done  # type: ignore[assignment, method-assign]


def make_plan(builds: list[Build], *, launches: int = 1, **measurement: object) -> RunPlan:
    settings: dict[str, object] = {"depths": (20, 64), "requests_per_depth": 2, "max_tokens": MAX_TOKENS, "seed": 3}
    config = MeasurementConfig.model_validate({**settings, **measurement})
    return RunPlan.of("bench", "test", config, builds, launches)


def measured(directory: RunDirectory) -> list[StreamRecord]:
    return [stream for stream in directory.streams() if not stream.is_warmup]


def test_two_builds_of_known_speed(fake_build: MakeBuild, tmp_path: Path) -> None:
    plan = make_plan([fake_build("slow", "--step-ms", "20"), fake_build("fast", "--step-ms", "10")], launches=2)
    told: list[StreamRecord] = []
    run = Run.create(plan, tmp_path / "run", Told(told.append))
    manifest = run.measure()
    streams = measured(run.directory)
    assert manifest.finished_utc is not None
    assert told == streams
    for launch in range(2):
        order = [(s.slot, s.build, s.depth, s.block, s.request_id) for s in streams if s.launch == launch]
        assert order == [(s.order, s.build, s.depth, s.block, s.request_id) for s in run.schedule(launch)]
    assert all(stream.status is StreamStatus.OK for stream in streams), [s.void_reason for s in streams]
    for build, milliseconds in {"slow": 20, "fast": 10}.items():
        values = sorted(step_ms(stream) or 0 for stream in streams if stream.build == build)
        assert values[len(values) // 2] == pytest.approx(milliseconds, rel=0.1)
        assert {tokens_per_step(stream) for stream in streams if stream.build == build} == {4.0}
        assert all(tpot_ms(s) == pytest.approx((step_ms(s) or 0) / 4) for s in streams)
    requests = run.directory.requests()
    for stream in streams:
        last = requests[stream.request_id].prompt_ids[-1]
        for token in stream.token_ids:
            last = (7 * last + 3) % 97
            assert token == last
    assert Counter(stream.build for stream in run.directory.streams() if stream.is_warmup) == {"slow": 4, "fast": 4}
    assert [(r.build, r.launch) for r in manifest.launch_records] == [
        ("slow", 0),
        ("fast", 0),
        ("fast", 1),
        ("slow", 1),
    ]
    assert all(record.samples and record.ready_s > 0 for record in manifest.launch_records)
    assert all(record.server_counters_after["fake:prefix_cache_hits_total"] == 0 for record in manifest.launch_records)
    build = manifest.builds[0]
    assert build.command[1:4] == ("-m", "kernarc.cli", "serve")
    assert len(build.model_sha256 or "") == 64
    assert manifest.environment.cpu_count >= 1


def test_alternate_residency_runs_one_engine_at_a_time(fake_build: MakeBuild, tmp_path: Path) -> None:
    plan = make_plan([fake_build("a"), fake_build("b")], launches=2, residency="alternate")
    run = Run.create(plan, tmp_path / "run")
    run.measure()
    by_launch = {n: [s.build for s in measured(run.directory) if s.launch == n] for n in range(2)}
    assert by_launch == {0: ["a"] * 4 + ["b"] * 4, 1: ["b"] * 4 + ["a"] * 4}


def test_a_neighbour_that_never_rests_is_named_in_every_stream_it_may_have_slowed(
    fake_build: MakeBuild, tmp_path: Path
) -> None:
    builds = [fake_build("a", "--step-ms", "50"), fake_build("b", "--busy-when-idle")]  # slow enough to be seen
    beside = Run.create(make_plan(builds, depths=(20,)), tmp_path / "beside")
    records = {record.build: record.crowded_streams for record in beside.measure().launch_records}
    assert records == {"a": 2, "b": 0}
    streams = beside.directory.streams()
    assert {(s.build, s.busy_neighbours) for s in streams if not s.is_warmup} == {("a", ("b",)), ("b", ())}
    alone = Run.create(make_plan(builds, depths=(20,), residency="alternate"), tmp_path / "alone")
    alone.measure()
    assert {stream.busy_neighbours for stream in alone.directory.streams()} == {()}


def test_launch_by_launch_as_a_gate_does(fake_build: MakeBuild, tmp_path: Path) -> None:
    run = Run.create(make_plan([fake_build("a"), fake_build("b")], launches=5), tmp_path / "run")
    run.measure_launch(0)
    run.measure_launch(0)  # nothing left to do
    run.measure_launch(1)
    manifest = run.finish(launches=2)
    assert manifest.launches == 2
    assert Counter(stream.launch for stream in measured(run.directory)) == {0: 8, 1: 8}
    requests = run.directory.requests().values()
    assert {request.launch for request in requests} == {0, 1}
    assert len({request.prompt_ids[:16] for request in requests}) == len(requests)


def void_reasons(build: Build, out: Path, **measurement: object) -> tuple[list[StreamRecord], set[str | None]]:
    run = Run.create(make_plan([build], **measurement), out)
    run.measure()
    streams = measured(run.directory)
    return streams, {stream.void_reason for stream in streams}


def test_counters_that_show_cache_hits_void_the_launch(fake_build: MakeBuild, tmp_path: Path) -> None:
    streams, reasons = void_reasons(fake_build("a", "--cached-prompt-tokens", "16"), tmp_path / "run")
    assert all(stream.status is StreamStatus.VOID for stream in streams)
    assert reasons == {"the server's counters show 16 prompt tokens taken from its cache"}
    (launch,) = RunDirectory(tmp_path / "run").manifest().launch_records
    assert launch.void_reason == "the server's counters show 64 prompt tokens taken from its cache", "4, no warm-ups"


def test_steps_that_came_together_leave_the_step_time_unknown(fake_build: MakeBuild, tmp_path: Path) -> None:
    streams, reasons = void_reasons(fake_build("a", "--unseen-steps", "1"), tmp_path / "merged", depths=(20,))
    assert reasons == {None}
    assert [step_ms(stream) for stream in streams] == [None, None]
    assert all(tpot_ms(stream) for stream in streams)


def test_a_prompt_count_that_is_off_voids(fake_build: MakeBuild, tmp_path: Path) -> None:
    _, reasons = void_reasons(fake_build("a", "--prompt-tokens-off-by", "1"), tmp_path / "run", depths=(20,))
    assert reasons == {"the server counted 21 prompt tokens where 20 were sent"}


def test_an_answer_that_stops_early_voids_unless_the_rules_allow_it(fake_build: MakeBuild, tmp_path: Path) -> None:
    build = fake_build("a", "--stop-early", "3")
    _, reasons = void_reasons(build, tmp_path / "strict")
    assert reasons == {"14 tokens came where 17 were asked for with ignore_eos"}
    _, reasons = void_reasons(build, tmp_path / "allowed", void_rules=VoidRulesConfig(early_stop="note"))
    assert reasons == {None}


def test_output_that_repeats_itself_voids_unless_the_rules_allow_it(tmp_path: Path) -> None:
    with ConformanceServer() as server:
        build = resolve_build(f"endpoint:{server.url('repetition-loop')}#repetition-loop")
        _, reasons = void_reasons(build, tmp_path / "strict", depths=(20,), max_tokens=200)
        assert "degenerate output" in str(reasons)
        rules = VoidRulesConfig(repetition_loop="note", early_stop="note")
        _, reasons = void_reasons(build, tmp_path / "allowed", depths=(20,), max_tokens=200, void_rules=rules)
        assert reasons == {None}


def test_a_stall_voids_and_the_rest_is_kept(fake_build: MakeBuild, tmp_path: Path) -> None:
    build = fake_build("a", "--step-ms", "700")
    streams, reasons = void_reasons(
        build, tmp_path / "run", depths=(20,), requests_per_depth=1, limits={"stall_s": 0.4}, max_tokens=9
    )
    assert len(streams) == 1
    assert "stall" in str(reasons)


def test_a_dying_engine_ends_the_run_with_its_log_and_keeps_the_rest(fake_build: MakeBuild, tmp_path: Path) -> None:
    run = Run.create(make_plan([fake_build("a", "--die-at-request", "4")]), tmp_path / "run")
    with pytest.raises(EngineError, match=r"a ended while answering d\d+-l0-r\d with exit code 42") as error:
        run.measure()
    assert "  | fatal: planted fault" in error.value.message
    assert error.value.exit_code == 4
    assert len(measured(run.directory)) == 2, "two warm-ups, two measured, and the fifth request kills it"
    assert "fatal" not in run.directory.streams_path.read_text()
    (interruption,) = run.directory.manifest().interruptions
    assert interruption.streams_done == 2
    assert "exit code 42" in interruption.reason
    assert run.directory.torn_path.exists(), "the unfinished stream is set aside"
    assert [record.build for record in run.directory.manifest().launch_records] == ["a"]


def test_an_endpoint_that_goes_away_ends_the_run_and_keeps_the_rest(tmp_path: Path) -> None:
    with ConformanceServer() as server:
        build = resolve_build(f"endpoint:{server.url('steady-1ms')}#steady-1ms")
        plan = make_plan([build], depths=(20,), max_tokens=40)
        run = Run.create(plan, tmp_path / "run", Told(lambda _: server.__exit__()))
        with pytest.raises(EngineError, match="stopped answering while answering d20-l0-r1"):
            run.measure()
    assert len(measured(run.directory)) == 1
    assert run.directory.manifest().interruptions[0].streams_done == 1


def test_a_run_without_a_folder_is_found_by_its_id(
    fake_build: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Run.create(make_plan([fake_build("a")])).directory
    assert directory.path == Path("runs") / directory.manifest().run_id


def test_an_existing_run_is_refused_before_anything_starts(fake_build: MakeBuild, tmp_path: Path) -> None:
    plan = make_plan([fake_build("a")])
    Run.create(plan, tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run"):
        Run.create(plan, tmp_path / "run")


def test_a_model_that_is_not_there(fake_build: MakeBuild, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match="is not a checkpoint directory"):
        Run.create(make_plan([fake_build("a")]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_builds_of_one_name(fake_build: MakeBuild, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two builds are called the same"):
        Run.create(make_plan([fake_build("a"), fake_build("a")]), tmp_path / "run")


def test_prompts_avoid_the_model_s_end_of_text(fake_build: MakeBuild, tmp_path: Path) -> None:
    run = Run.create(make_plan([fake_build("a")]), tmp_path / "run")
    run.measure()
    ids = {token for request in run.directory.requests().values() for token in request.prompt_ids}
    assert max(ids) < 90
    assert 5 not in ids


def test_the_plan_is_kept_as_it_was(fake_build: MakeBuild, tmp_path: Path, manifest: RunManifest) -> None:
    from kernarc.harness.run.plan import read_plan

    plan = make_plan([fake_build("a")], launches=3)
    run = Run.create(plan, tmp_path / "run")
    assert read_plan(run.directory) == plan
