"""How far a run got is told from every trace it left, not from its plan."""

from collections.abc import Callable

import pytest
from kernarc.harness.run.completeness import begun_launches, complete_launches, how_to_continue, missing_streams
from kernarc.harness.run.records import LaunchRecord, RunManifest, StreamRecord
from kernarc.harness.run.storage import Request


@pytest.fixture
def comparison(manifest: RunManifest) -> RunManifest:
    """Two builds, two requests a launch, at most 12 launches; the first one ended as it should."""
    first, second = manifest.builds[0], manifest.builds[0].model_copy(update={"name": "b"})
    records = tuple(LaunchRecord(build=name, launch=0, ready_s=1.0) for name in "ab")
    changes = {"kind": "compare", "builds": (first, second), "launches": 12, "launch_records": records}
    return manifest.model_copy(update=changes)


def test_a_launch_without_a_record_counts_by_its_streams_or_its_prompts(
    comparison: RunManifest, stream: Callable[..., StreamRecord]
) -> None:
    streams = [stream(f"d128-l0-r{number}", build=build) for build in "ab" for number in range(2)]
    assert begun_launches(comparison, streams) == {0}
    assert missing_streams(comparison, streams, "ab", frozenset({0})) == {}
    assert complete_launches(comparison, streams) == 1
    killed = [*streams, stream("d128-l1-w0", launch=1, is_warmup=True), stream("d128-l1-r0", launch=1)]
    begun = begun_launches(comparison, killed)
    assert begun == {0, 1}
    assert missing_streams(comparison, killed, "ab", begun) == {"a": 1, "b": 2}
    assert complete_launches(comparison, killed) == 1
    prompt = Request(request_id="d128-l2-r0", depth=128, launch=2, prompt_ids=(1,))
    assert begun_launches(comparison, killed, [prompt]) == {0, 1, 2}


def test_a_bench_owes_every_launch_of_its_plan(manifest: RunManifest) -> None:
    bench = manifest.model_copy(update={"launches": 3})
    assert missing_streams(bench, [], "a", begun_launches(bench, [])) == {"a": 6}


def test_only_what_can_be_resumed_is_told_to_be(manifest: RunManifest) -> None:
    assert how_to_continue("compare", "runs/x") == "continue with `kernarc-gate compare --resume runs/x`"
    assert "--resume" not in how_to_continue("calibrate", "runs/x")
