"""The table against numbers worked out here from the records, and every way a cell loses its speed."""

import csv
import io
import json
import math
import random
from pathlib import Path
from statistics import median

import pytest
from kernarc.harness.run.records import StreamRecord, StreamStatus
from kernarc.harness.run.storage import RunDirectory
from kernarc.reports import frames, table_files
from kernarc.reports.render import render_table_text
from kernarc.reports.saved import load_runs
from kernarc.reports.tables import SpeedTable, speed_table

from ..fakes.runs import DEPTHS, write_check
from .conftest import MakeRun


def token_times_ms(stream: StreamRecord) -> float:
    """TPOT from the definition, not through metrics.py."""
    after_first = len(stream.token_ids) - len(stream.events[0].token_ids)
    return (stream.events[-1].t_ns - stream.events[0].t_ns) / 1e6 / after_first


@pytest.fixture(scope="module")
def table(full_run: Path) -> SpeedTable:
    return speed_table(load_runs([full_run]))


def test_cells_agree_with_the_records(full_run: Path, table: SpeedTable) -> None:
    streams = RunDirectory(full_run).streams()
    for build in ("vllm", "kernarc"):
        for depth in DEPTHS:
            expected = median(token_times_ms(s) for s in streams if s.build == build and s.depth == depth)
            cell = table.cells[f"0:{build}", depth]
            assert cell.tpot_ms == pytest.approx(expected, rel=1e-12)
            assert cell.tokens_per_second == pytest.approx(1000 / expected, rel=1e-12)
            assert cell.tpot is not None
            assert cell.tpot.low is not None
            assert cell.tpot.high is not None
            assert cell.tpot.low < expected < cell.tpot.high


def test_a_paired_speed_up_is_the_geometric_mean_of_request_ratios(full_run: Path, table: SpeedTable) -> None:
    streams = {(s.build, s.request_id): s for s in RunDirectory(full_run).streams()}
    logs = {
        depth: [
            math.log(token_times_ms(streams["vllm", request]) / token_times_ms(streams["kernarc", request]))
            for build, request in streams
            if build == "vllm" and request.startswith(f"d{depth}-")
        ]
        for depth in DEPTHS
    }
    for depth in DEPTHS:
        speed_up = table.speed_ups["0:kernarc", depth]
        assert speed_up.ratio == pytest.approx(math.exp(sum(logs[depth]) / len(logs[depth])), rel=1e-12)
        assert not speed_up.is_derived
        assert speed_up.pairs == 40
    overall = table.speed_ups["0:kernarc", None]
    means = [sum(values) / len(values) for values in logs.values()]
    assert overall.ratio == pytest.approx(math.exp(sum(means) / len(means)), rel=1e-12)


def test_columns_of_two_sessions_are_derived_and_have_no_interval(make_run: MakeRun, tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", builds=("vllm",), launches=1, tokens=32)
    second = make_run(tmp_path / "b", builds=("kernarc",), launches=1, tokens=32, run_id="run-0002")
    table = speed_table(load_runs([first, second]))
    speed_up = table.speed_ups["1:kernarc", 128]
    cells = table.cells
    assert speed_up.is_derived
    assert (speed_up.low, speed_up.high) == (None, None)
    assert speed_up.ratio == pytest.approx((cells["0:vllm", 128].tpot_ms or 0) / (cells["1:kernarc", 128].tpot_ms or 1))
    assert "derived" in table_files.markdown(table)


def test_an_unchecked_cell_has_no_speed_in_a_publication_and_says_so_after_a_bench(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", launches=1, tokens=32, checked=False)
    published = speed_table(load_runs([run]))
    assert all(cell.tpot is None and "not checked" in (cell.void_reason or "") for cell in published.cells.values())
    assert not published.geometric_means
    benched = speed_table(load_runs([run]), require_check=False)
    assert all(cell.tpot is not None for cell in benched.cells.values())
    assert "Outputs not checked yet" in render_table_text(benched)


def test_a_failed_check_takes_the_speed_even_after_a_bench(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", launches=1, tokens=32)
    write_check(run, ("vllm", "kernarc"), kernarc="3 outputs diverge")
    table = speed_table(load_runs([run]), require_check=False)
    assert all((table.cells["0:kernarc", depth].tpot is None) for depth in DEPTHS)
    assert all("3 outputs diverge" in (table.cells["0:kernarc", depth].void_reason or "") for depth in DEPTHS)
    assert all((table.cells["0:vllm", depth].tpot is not None) for depth in DEPTHS)
    assert all(speed_up.ratio is None for speed_up in table.speed_ups.values())
    assert not table.geometric_means
    assert "no speed" in render_table_text(table)


def test_a_check_of_fewer_streams_than_were_measured_is_no_check(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", launches=1, tokens=32)
    document = json.loads((run / "check.json").read_text())
    document["output_checks"][1]["streams"] -= 1
    (run / "check.json").write_text(json.dumps(document))
    cell = speed_table(load_runs([run])).cells["0:kernarc", 128]
    assert cell.tpot is None
    assert "31 of 32 streams were checked" in (cell.void_reason or "")


def test_a_gate_that_stopped_early_has_all_its_streams_and_a_bench_has_not(make_run: MakeRun, tmp_path: Path) -> None:
    shape = {"launches": 3, "planned_launches": 12, "tokens": 32, "depths": (128,)}
    compared = speed_table(load_runs([make_run(tmp_path / "compare", kind="compare", **shape)]))
    assert compared.cells["0:kernarc", 128].tpot is not None
    benched = speed_table(load_runs([make_run(tmp_path / "bench", kind="bench", **shape)]))
    assert "24 of 96 streams recorded" in (benched.cells["0:kernarc", 128].void_reason or "")


def test_streams_that_began_beside_a_busy_engine_are_told_with_the_table(make_run: MakeRun, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", launches=2, tokens=32)
    assert "using the processor" not in render_table_text(speed_table(load_runs([path])), 200)
    directory = RunDirectory(path)
    records = [
        record.model_copy(update={"crowded_streams": 11 * (record.build == "kernarc")})
        for record in directory.manifest().launch_records
    ]
    directory.update_manifest(launch_records=tuple(records))
    table = speed_table(load_runs([path]))
    for text in (render_table_text(table, 200), table_files.markdown(table)):
        assert f"kernarc: 22 of {2 * 8 * len(DEPTHS)} streams were measured while another engine" in text
        assert "- vllm: " not in text
        assert "vllm: 0 of" not in text


@pytest.mark.parametrize(("launches", "is_told"), [(1, False), (3, True)])
def test_repeats_against_a_running_server_are_not_called_launches(
    make_run: MakeRun, tmp_path: Path, launches: int, *, is_told: bool
) -> None:
    path = make_run(tmp_path / "run", launches=launches, tokens=32)
    directory = RunDirectory(path)
    vllm, kernarc = directory.manifest().builds
    directory.update_manifest(builds=(vllm.model_copy(update={"engine": "endpoint"}), kernarc))
    text = render_table_text(speed_table(load_runs([path])), 200)
    assert ("vllm: not restarted between launches" in text) is is_told
    assert "kernarc: not restarted" not in text


def void_at_8192(stream: StreamRecord) -> StreamRecord:
    if stream.build == "kernarc" and stream.request_id == "d8192-l0-r3":
        return stream.model_copy(update={"status": StreamStatus.VOID, "void_reason": "stalled for 10 s"})
    return stream


def test_the_geometric_mean_spans_the_depths_at_which_every_build_has_a_speed(
    make_run: MakeRun, tmp_path: Path
) -> None:
    table = speed_table(load_runs([make_run(tmp_path / "run", launches=1, tokens=32, change=void_at_8192)]))
    assert table.geometric_mean_depths == (128, 32768, 65536)
    tpots = [table.cells["0:kernarc", depth].tpot_ms or 0 for depth in table.geometric_mean_depths]
    assert table.geometric_means["0:kernarc"].tpot_ms == pytest.approx(math.prod(tpots) ** (1 / 3))
    assert "Geometric mean over the depths at which every build has a speed: 128, 32,768, 65,536." in (
        table_files.markdown(table)
    )


def void_one(stream: StreamRecord) -> StreamRecord:
    if stream.build == "kernarc" and stream.request_id == "d128-l0-r3":
        return stream.model_copy(update={"status": StreamStatus.VOID, "void_reason": "stalled for 10 s"})
    return stream


def lose_one(stream: StreamRecord) -> StreamRecord | None:
    return None if stream.build == "kernarc" and stream.request_id == "d128-l0-r3" else stream


@pytest.mark.parametrize(
    ("change", "reason"), [(void_one, "1 of 8 streams void: stalled for 10 s"), (lose_one, "7 of 8 streams recorded")]
)
def test_void_and_missing_streams_take_the_speed(
    make_run: MakeRun, tmp_path: Path, change: object, reason: str
) -> None:
    run = make_run(tmp_path / "run", launches=1, tokens=32, change=change)
    cell = speed_table(load_runs([run])).cells["0:kernarc", 128]
    assert cell.tpot is None
    assert reason in (cell.void_reason or "")
    assert reason in table_files.markdown(speed_table(load_runs([run])))


def test_markdown_csv_and_json_say_the_same(table: SpeedTable) -> None:
    from_csv = list(csv.DictReader(io.StringIO(table_files.csv_text(table))))
    from_json = json.loads(frames.json_text(table_files.document(table)))["cells"]
    lines = table_files.markdown(table).splitlines()[2:]
    for line, row, cell in zip(lines, from_csv, from_json, strict=False):
        printed = [text.strip() for text in line.strip("|").split("|")]
        assert float(row["tpot_ms"]) == cell["tpot_ms"]
        assert float(row["tokens_per_second"]) == cell["tokens_per_second"]
        assert printed[1] == row["build"] == cell["build"]
        assert float(printed[2]) == round(cell["tokens_per_second"], 1)
        assert float(printed[3]) == round(cell["tpot_ms"], 2)
        if cell["speed_up"] is not None:
            assert printed[8] == f"×{cell['speed_up']:.2f}"


def test_rows_of_streams_in_any_order_give_the_same_table(make_run: MakeRun, tmp_path: Path, table: SpeedTable) -> None:
    shuffled = speed_table(load_runs([make_run(tmp_path / "full", shuffle=random.Random(3).randrange(99))]))
    for render in (
        table_files.markdown,
        table_files.csv_text,
        lambda each: frames.json_text(table_files.document(each)),
    ):
        assert render(shuffled) == render(table)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_terminal_table_keeps_every_number_at_any_width(table: SpeedTable, width: int) -> None:
    text = render_table_text(table, width)
    assert max(len(line) for line in text.splitlines()) <= width
    for header in ("tok/s", "ms/token", "ms/step", "token ms", "speed-up", "Geomean"):
        assert header in text
