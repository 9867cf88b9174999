"""Real stock vLLM beside the bundled decoder: same requests, same ids, exact depths, nothing left running."""

from pathlib import Path

import psutil
import pytest
from kernarc.harness.config.builds import build_from_config, resolve_build
from kernarc.harness.config.models import BuildConfig, MeasurementConfig
from kernarc.harness.engines.vllm_install import find_installation, import_check
from kernarc.harness.run.agreement import id_agreement
from kernarc.harness.run.plan import RunPlan
from kernarc.harness.run.records import StreamRecord, StreamStatus
from kernarc.harness.run.run import Run

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_installation() is None, reason="vLLM is not installed: `kernarc-gate engines install vllm`"
    ),
]
DEPTHS = (128, 300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two launches' worth of one: eager vLLM, which is ready sooner than compiled and has the same protocol and ids."""
    eager = BuildConfig(engine="vllm", num_speculative_tokens=3, extra_args=("--enforce-eager",))
    builds = [build_from_config("vllm", eager), resolve_build("kernarc")]
    config = MeasurementConfig(depths=DEPTHS, requests_per_depth=2, max_tokens=48)
    run = Run.create(RunPlan.of("bench", "test", config, builds, 1), tmp_path_factory.mktemp("vllm") / "run")
    run.measure()
    return run


def measured(run: Run, build: str) -> list[StreamRecord]:
    return [stream for stream in run.directory.streams() if stream.build == build and not stream.is_warmup]


def test_every_stream_is_sound_and_of_exact_depth(run: Run) -> None:
    streams = measured(run, "vllm")
    assert len(streams) == 4
    assert [stream.void_reason for stream in streams if stream.status is not StreamStatus.OK] == []
    assert all(stream.usage.prompt_tokens == stream.depth for stream in streams)
    assert all(len(stream.token_ids) == 48 for stream in streams)


def test_the_manifest_says_what_each_engine_computes_with(run: Run) -> None:
    vllm, ours = run.directory.manifest().builds
    assert {"torch", "transformers"} <= set(vllm.library_versions)
    assert ours.library_versions == {}  # the environment of the run itself


def test_greedy_ids_of_both_engines_are_equal(run: Run) -> None:
    agreement = id_agreement(run.directory.streams(), "vllm", "kernarc")
    assert (agreement.requests, agreement.equal, agreement.first_difference) == (4, 4, None)


def test_events_are_called_steps_only_where_vllm_counts_as_many_drafts(run: Run) -> None:
    """On a busy machine vLLM's server sends two steps as one event now and then; such a stream has no step time."""
    (record,) = [record for record in run.directory.manifest().launch_records if record.build == "vllm"]
    drafts = "vllm:spec_decode_num_drafts_total"
    steps = record.server_counters_after[drafts] - record.server_counters_before[drafts]
    streams = measured(run, "vllm")
    assert (sum(len(stream.events) - 1 for stream in streams) == steps) == all(s.events_are_steps for s in streams)
    assert sum(len(stream.events) - 1 for stream in streams) > steps / 2


def test_the_prefix_cache_is_off_and_its_counters_say_so(run: Run) -> None:
    for record in run.directory.manifest().launch_records:
        hits = [value for name, value in record.server_counters_after.items() if "prefix_cache_hits" in name]
        assert hits
        assert set(hits) == {0.0}
        assert record.void_reason is None


def test_nothing_of_vllm_is_left_running(run: Run) -> None:
    assert run.is_finished
    installed = str(find_installation().folder)  # type: ignore[union-attr]
    names = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert [name for name in names if installed in name and str(run.directory.path) in name] == []
    model = str(Path(run.directory.manifest().builds[0].model))
    assert [name for name in names if "vllm" in name and model in name] == []


def test_the_installation_imports_with_its_pin() -> None:
    installation = find_installation()
    assert installation is not None
    assert import_check(installation).startswith(installation.version)
