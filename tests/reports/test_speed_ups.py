"""A comparison's table says what its verdict says: start order taken out; a bench's is the plain geometric mean."""

import math
from pathlib import Path
from statistics import fmean

import pytest
from kernarc.harness.run.records import StreamRecord
from kernarc.reports.notes import general_notes
from kernarc.reports.saved import SavedRun
from kernarc.reports.speed_ups import paired
from kernarc.reports.tables import speed_table

from .conftest import MakeRun


def second_is_quicker(stream: StreamRecord) -> StreamRecord:
    """Even launches start vllm first: there kernarc takes 0.9 of its time, in odd ones vllm does."""
    if stream.build != ("kernarc", "vllm")[stream.launch % 2]:
        return stream
    events = (event.model_copy(update={"t_ns": round(event.t_ns * 0.9)}) for event in stream.events)
    return stream.model_copy(update={"events": tuple(events)})


def log_ratio(run: SavedRun, launch: int) -> float:
    """Mean ln(vllm / kernarc) of a launch, from the definition of TPOT."""
    times = {
        (s.build, s.request_id): (s.events[-1].t_ns - s.events[0].t_ns)
        / (len(s.token_ids) - len(s.events[0].token_ids))
        for s in run.streams
        if s.launch == launch
    }
    requests = {request for _, request in times}
    return fmean(math.log(times["vllm", request] / times["kernarc", request]) for request in requests)


@pytest.mark.parametrize("kind", ["compare", "bench"])
def test_a_comparison_takes_start_order_out_and_a_bench_does_not(make_run: MakeRun, tmp_path: Path, kind: str) -> None:
    run = SavedRun.load(make_run(tmp_path / "run", depths=(128,), kind=kind, with_text=False, change=second_is_quicker))
    found = paired(run, "vllm", "kernarc", [128]).by_depth[128]
    logs = [log_ratio(run, launch) for launch in range(5)]
    of_orders = (fmean(logs[::2]) + fmean(logs[1::2])) / 2
    expected = of_orders if kind == "compare" else fmean(logs)
    assert found.ratio == pytest.approx(math.exp(expected), rel=1e-9)
    assert found.is_crossover is (kind == "compare")
    assert fmean(logs) - of_orders == pytest.approx(-math.log(0.9) / 5, abs=0.005), "what an odd launch leaves in"
    text = " ".join(note.text for note in general_notes([run], speed_table([run])))
    assert ("taken out of it (crossover)" in text) is (kind == "compare")
