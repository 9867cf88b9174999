"""`report --against`, `history`, and the two commands' own behaviour."""

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kernarc.harness.errors import RecordError
from kernarc.harness.run.storage import RunDirectory
from kernarc.reports.commands.report import history, report
from kernarc.reports.history import read_history
from kernarc.reports.render import Publication

from ..fakes.runs import write_check
from .conftest import MakeRun

SMALL = {"launches": 3, "requests_per_depth": 4, "tokens": 32, "depths": (128, 8192)}


@pytest.fixture(scope="module")
def folder(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two publications of the same builds; in the second, kernarc and vllm take 10 % less time a step."""
    root = tmp_path_factory.mktemp("history")
    make_run(root / "b-first", **SMALL)
    later = {"scale": 0.9, "run_id": "run-0002", "created_utc": "2026-10-20T10:00:00.000+00:00"}
    make_run(root / "deep" / "a-second", **SMALL, **later)
    return root


def invoke(*arguments: object) -> Result:
    command, *rest = arguments
    return CliRunner().invoke(command, [str(each) for each in rest])  # type: ignore[arg-type]


def test_a_ten_percent_shorter_step_is_what_moved(folder: Path) -> None:
    publication = Publication.of([folder / "deep" / "a-second"], against=[folder / "b-first"])
    assert publication.revision is not None
    for movement in publication.revision.movements:
        assert movement.tpot_change == pytest.approx(-0.1, abs=0.02)
        assert movement.step_change == pytest.approx(-0.1, abs=0.02)
        assert movement.tokens_per_step_change == pytest.approx(0.0, abs=0.001)
    assert {(each.depth, each.build) for each in publication.revision.movements} == {
        (depth, build) for depth in (128, 8192) for build in ("vllm", "kernarc")
    }


def test_against_is_shown_written_and_drawn_as_revision_b(folder: Path, tmp_path: Path) -> None:
    result = invoke(report, folder / "deep" / "a-second", "--against", folder / "b-first", "--out", tmp_path)
    assert result.exit_code == 0
    assert "ms/token before" in result.stdout
    moved = json.loads((tmp_path / "moved.json").read_text())
    assert len(moved["moved"]) == 4
    page = (tmp_path / "index.html").read_text()
    assert "<dt>Rev</dt><dd>B</dd>" in page
    assert "What moved since drawing KG-" in page


def test_runs_of_different_machines_show_no_change_but_the_reason(
    folder: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    other = make_run(tmp_path / "other", **SMALL, run_id="run-0003")
    environment = RunDirectory(other).manifest().environment.model_copy(update={"gpu_name": "NVIDIA H200"})
    RunDirectory(other).update_manifest(environment=environment)
    revision = Publication.of([other], against=[folder / "b-first"]).revision
    assert revision is not None
    assert all(movement.tpot_change is None for movement in revision.movements)
    assert "environment.gpu_name differs" in (revision.refusal or "")
    table = Publication.of([folder / "b-first", other]).table
    assert table.speed_ups["1:kernarc", 128].ratio is None
    assert "environment.gpu_name differs" in (table.speed_ups["1:kernarc", 128].reason or "")


def test_history_lists_runs_by_date_wherever_they_lie(folder: Path) -> None:
    found = read_history(folder)
    assert [run_id for _, run_id in found.runs] == ["run-0001", "run-0002"]
    assert len(found.entries) == 8
    streams = [s for s in RunDirectory(folder / "b-first").streams() if s.build == "vllm" and s.depth == 128]
    times = sorted(
        (s.events[-1].t_ns - s.events[0].t_ns) / 1e6 / (len(s.token_ids) - len(s.events[0].token_ids)) for s in streams
    )
    assert found.entries[0].tpot_ms == pytest.approx((times[5] + times[6]) / 2)


def test_history_writes_table_and_small_multiples_of_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        result = invoke(history, folder, "--out", tmp_path / name)
        assert result.exit_code == 0
        assert "012345678" in result.stdout
    names = ["history.csv", "history.json", "history.md", "history.png", "history.svg"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    rows = list(csv.DictReader(io.StringIO((tmp_path / "one" / "history.csv").read_text())))
    printed = json.loads(invoke(history, folder, "--json").stdout)["rows"]
    assert [float(row["tpot_ms"]) for row in rows] == [row["tpot_ms"] for row in printed]


def test_another_model_or_machine_is_another_line(folder: Path, make_run: MakeRun, tmp_path: Path) -> None:
    make_run(tmp_path / "a", **SMALL)
    other = make_run(tmp_path / "b", **SMALL, run_id="run-0002")
    builds = tuple(
        each.model_copy(update={"model": "/srv/models/other"}) for each in RunDirectory(other).manifest().builds
    )
    RunDirectory(other).update_manifest(builds=builds)
    names = list(read_history(tmp_path).series.values())
    assert names == ["vllm, tiny-structured", "kernarc, tiny-structured", "vllm, other", "kernarc, other"]
    assert list(read_history(folder).series.values()) == ["vllm", "kernarc"]


def test_history_says_what_it_skipped_and_shows_no_wrong_speed(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "good", **SMALL)
    write_check(run, ("vllm", "kernarc"), kernarc="4 outputs diverge")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    found = read_history(tmp_path)
    assert found.skipped[0][0] == "broken"
    assert {entry.build for entry in found.entries if entry.tpot_ms is None} == {"kernarc"}
    assert "broken: skipped" in invoke(history, tmp_path).stdout


def test_refusals_name_what_to_do(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(RecordError, match="is not a folder"):
        read_history(tmp_path / "nowhere")
    with pytest.raises(RecordError, match="no run directory"):
        read_history(tmp_path)
    result = invoke(report, folder / "b-first", folder / "deep" / "a-second")
    assert result.exit_code == 2
    assert "--out" in result.stderr
    broken = tmp_path / "run"
    broken.mkdir()
    (broken / "manifest.json").write_text((folder / "b-first" / "manifest.json").read_text())
    (broken / "streams.jsonl").write_text("")
    (broken / "check.json").write_text('{"output_checks": 3}')
    with pytest.raises(RecordError, match=r"check\.json: output_checks"):
        Publication.of([broken]).write(tmp_path)


def test_report_ends_with_4_where_nothing_may_be_published(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **SMALL, checked=False)
    result = invoke(report, run, "--json")
    assert result.exit_code == 4
    document = json.loads(result.stdout)
    assert document["files"] == ["table.md", "table.csv", "table.json", "speed.svg", "speed.png", "index.html"]
    assert all(cell["tpot_ms"] is None and "not checked" in cell["void_reason"] for cell in document["cells"])
    assert (run / "index.html").exists()
