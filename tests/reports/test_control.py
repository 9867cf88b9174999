"""A block that the gate's control build voided is in no number of the report, and the report says so."""

import json
from pathlib import Path
from statistics import median

from kernarc.harness.run.records import StreamRecord
from kernarc.reports.notes import general_notes
from kernarc.reports.saved import SavedRun, load_runs
from kernarc.reports.tables import speed_table

from .conftest import MakeRun

BUILDS = ("vllm", "kernarc", "kernarc-control")
VOID_BLOCK = (2, 1)  # launch, block
CONFIG = "depths: [128]\nrequests_per_depth: 8\nlooks: [5]\nmax_control_drift: 0.2\ncontrol: kernarc-control\n"


def machine_slows_down(stream: StreamRecord) -> StreamRecord:
    """In one block everything but the baseline takes twice as long, and the control shows it."""
    if (stream.launch, stream.block) != VOID_BLOCK or stream.build == "vllm":
        return stream
    first = stream.events[0].t_ns
    events = (event.model_copy(update={"t_ns": 2 * event.t_ns - first}) for event in stream.events)
    return stream.model_copy(update={"events": tuple(events)})


def controlled(make_run: MakeRun, path: Path) -> Path:
    run = make_run(path, builds=BUILDS, depths=(128,), kind="compare", change=machine_slows_down)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "config_yaml": CONFIG}))
    return run


def tpot_ms(stream: StreamRecord) -> float:
    first, *rest = stream.events
    return (rest[-1].t_ns - first.t_ns) / 1e6 / sum(len(event.token_ids) for event in rest)


def test_a_voided_block_is_in_no_cell_and_no_ratio(make_run: MakeRun, tmp_path: Path) -> None:
    (run,) = load_runs([controlled(make_run, tmp_path / "run")])
    assert run.control.void_blocks == {VOID_BLOCK}
    table = speed_table([run])
    sound = [stream for stream in run.streams if (stream.launch, stream.block) != VOID_BLOCK]
    for build in BUILDS:
        cell = table.cells[f"0:{build}", 128]
        assert cell.streams == 5 * 8 - 2
        assert cell.void_reason is None, "38 streams are all that the plan holds without that block"
        assert cell.tpot_ms == median(tpot_ms(stream) for stream in sound if stream.build == build)
    assert table.speed_ups["0:kernarc", 128].pairs == 38


def test_the_report_says_how_many_blocks_it_leaves_out(make_run: MakeRun, tmp_path: Path) -> None:
    run = SavedRun.load(controlled(make_run, tmp_path / "run"))
    (note,) = [note for note in general_notes([run], speed_table([run])) if note.title == "Void and interrupted"]
    assert "1 of 20 blocks left out, because the control build kernarc-control drifted there" in note.text


def test_a_third_build_that_is_no_control_voids_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    """A bench of three builds has no control, whatever its builds are called."""
    run = SavedRun.load(make_run(tmp_path / "run", builds=BUILDS, depths=(128,), change=machine_slows_down))
    assert run.control.void_blocks == frozenset()
    assert speed_table([run]).cells["0:kernarc", 128].streams == 40
