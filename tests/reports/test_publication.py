"""The files of a publication: the same bytes from the same records, and one number everywhere."""

import html
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import matplotlib as mpl
import pytest
from kernarc.harness.errors import ConfigError
from kernarc.harness.run.records import StreamRecord
from kernarc.harness.run.storage import RunDirectory
from kernarc.reports import chart
from kernarc.reports import replay as race
from kernarc.reports.chart import BASELINE_STROKE, STROKES
from kernarc.reports.notes import general_notes
from kernarc.reports.render import render_run
from kernarc.reports.saved import load_runs
from kernarc.reports.tables import speed_table
from PIL import Image

from ..fakes.runs import DEPTHS, PIECES
from .conftest import MakeRun

NAMES = ["table.md", "table.csv", "table.json", "speed.svg", "speed.png", "index.html"]


@pytest.fixture(scope="module")
def published(full_page: Path) -> Path:
    return full_page.parent


def test_two_renders_and_shuffled_records_give_the_same_bytes(
    make_run: MakeRun, tmp_path: Path, published: Path
) -> None:
    shuffled = make_run(tmp_path / "elsewhere", shuffle=11)
    paths = render_run([shuffled], tmp_path / "out")
    assert [path.name for path in paths] == NAMES
    for path in paths:
        assert path.read_bytes() == (published / path.name).read_bytes(), path.name


def test_a_run_kept_compressed_publishes_the_same_bytes(tmp_path: Path, full_run: Path, published: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("manifest.json", "check.json"):
        (kept / name).write_bytes((full_run / name).read_bytes())
    (kept / "streams.jsonl.xz").write_bytes(lzma.compress((full_run / "streams.jsonl").read_bytes()))
    for path in render_run([kept], tmp_path / "out"):
        assert path.read_bytes() == (published / path.name).read_bytes(), path.name
    with pytest.raises(ConfigError, match="packed"):
        RunDirectory(kept).append(RunDirectory(kept).streams()[0])


def test_another_process_with_other_settings_gives_the_same_bytes(
    tmp_path: Path, full_run: Path, published: Path
) -> None:
    (tmp_path / "matplotlibrc").write_text("font.size: 20\nsvg.fonttype: none\nlines.linewidth: 5\n")
    environment = {
        **os.environ, "PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path), "TZ": "Asia/Tokyo", "LC_ALL": "C",
        "MPLBACKEND": "pdf",
    }  # fmt: skip
    command = [sys.executable, "-m", "kernarc.cli", "report", str(full_run), "--out", str(tmp_path / "out")]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    for name in NAMES:
        assert (tmp_path / "out" / name).read_bytes() == (published / name).read_bytes(), name


def test_a_chart_drawn_after_somebody_changed_matplotlib_is_the_same(published: Path, full_run: Path) -> None:
    table = speed_table(load_runs([full_run]))
    with mpl.rc_context({"font.size": 22, "axes.facecolor": "red", "svg.hashsalt": "x"}):
        assert chart.render_svg(table) == (published / "speed.svg").read_bytes()
        assert chart.render_png(table) == (published / "speed.png").read_bytes()


def test_no_file_holds_a_rendering_time_or_a_font_to_load(published: Path) -> None:
    svg = (published / "speed.svg").read_text()
    assert "<dc:date>" not in svg
    assert "font-family" not in svg
    with Image.open(published / "speed.png") as image:
        assert image.size == (1440, 960)
        assert set(image.info) <= {"dpi"}


def test_the_builds_stay_apart_in_grey() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    baseline, candidate = luminance(BASELINE_STROKE.colour), luminance(STROKES[0].colour)
    assert (baseline + 0.05) / (candidate + 0.05) > 1.7
    shapes = [(stroke.dash, stroke.marker, stroke.is_filled) for stroke in (BASELINE_STROKE, *STROKES)]
    assert len(set(shapes)) == len(shapes)


def test_page_markdown_and_json_print_what_the_records_hold(published: Path, full_run: Path) -> None:
    streams = RunDirectory(full_run).streams()
    page, markdown = (published / "index.html").read_text(), (published / "table.md").read_text()
    cells = {
        (each["build"], each["depth"]): each for each in json.loads((published / "table.json").read_text())["cells"]
    }
    for build in ("vllm", "kernarc"):
        for depth in DEPTHS:
            tpot = median(_tpot_ms(s) for s in streams if s.build == build and s.depth == depth)
            assert cells[build, depth]["tpot_ms"] == pytest.approx(tpot, rel=1e-5)
            printed_ms, printed_speed = f"{tpot:.2f}", f"{1000 / tpot:.1f}"
            assert f"| {depth:,} | {build} | {printed_speed} | {printed_ms} |" in markdown
            assert f"{build}, {depth:,} tokens of context: {printed_speed} tok/s, {printed_ms} ms/token" in page
            assert f">{printed_speed}</td>" in page
            assert f'<td class="group">{printed_ms}<small>' in page


def _tpot_ms(stream: StreamRecord) -> float:
    after_first = len(stream.token_ids) - len(stream.events[0].token_ids)
    return (stream.events[-1].t_ns - stream.events[0].t_ns) / 1e6 / after_first


def test_the_page_asks_nobody_for_anything_and_is_small(published: Path) -> None:
    page = (published / "index.html").read_text()
    assert len(page.encode()) < 1_500_000
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_recorded_text_is_data_and_nothing_else(published: Path, full_run: Path) -> None:
    page = (published / "index.html").read_text()
    block = page.split('id="race-data">')[1].split("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(block)
    races = json.loads(block)["races"]
    recorded = {(s.build, s.request_id): s for s in RunDirectory(full_run).streams()}
    for each, depth in zip(races, DEPTHS, strict=True):
        assert each["depth"] == f"{depth:,}"
        for lane in each["lanes"]:
            stream = recorded[lane["label"], lane["request"]]
            assert "".join(lane["text"]) == stream.text
            assert lane["n"] == [len(event.token_ids) for event in stream.events]
            times = [(event.t_ns - stream.events[0].t_ns) / 1e6 for event in stream.events]
            assert [t / 10 for t in lane["t"]] == pytest.approx(times, abs=0.051)
    body = page.split("<main")[1].split("</main>")[0]
    for piece in PIECES:
        if "<" in piece:
            assert piece not in body.replace("</b>", "").replace("<b>", "")
            assert str(html.escape(piece)) in body


def test_very_long_outputs_are_cut_to_keep_the_page_small(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", launches=1, requests_per_depth=1, depths=(128,))
    monkeypatch.setattr(race, "MAX_DATA_BYTES", 2_000)
    render_run([run], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    block = page.split('id="race-data">')[1].split("</script>")[0]
    assert len(block.encode()) <= 2_000
    lanes = json.loads(block)["races"][0]["lanes"]
    assert all(lane["cut"] and len(lane["t"]) == len(lane["text"]) for lane in lanes)
    assert f'<dd class="tokens">{sum(lanes[0]["n"])}</dd>' in page
    assert "only the beginning of a long output" in page


def test_notes_come_from_the_manifest(published: Path) -> None:
    page = html.unescape((published / "index.html").read_text())
    for fact in (
        "NVIDIA A100-SXM4-80GB", "driver 570.10", "3 draft tokens a step", "vllm: vllm 0.31.0", "torch 2.13.0",
        "2026-10-14 09:00 UTC", "5 launches of each engine, 8 requests a depth", "ABBA", "tiny-structured",
        "all 40,960 output tokens of the 160 streams",
    ):  # fmt: skip
        assert fact in page, fact


@pytest.mark.parametrize("made", [(0, 1), (1,)], ids=["all builds", "one of two"])
def test_weights_that_were_made_and_not_trained_and_an_engine_s_own_libraries_are_stated(
    make_run: MakeRun, tmp_path: Path, made: tuple[int, ...]
) -> None:
    run = make_run(tmp_path / "run", launches=1, requests_per_depth=1, depths=(128,), tokens=16)
    manifest = json.loads((run / "manifest.json").read_text())
    for place in made:
        manifest["builds"][place]["structured_acceptance"] = 0.87
    manifest["builds"][0]["library_versions"] = {"triton": "9.8", "torch": "9.9"}
    manifest["builds"][0]["environment"] = {"SOME_SETTING": "skip"}
    manifest["builds"][0]["command"] = [
        "python",
        "-m",
        "serve",
        "--model",
        "/a/b",
        "--port",
        "0",
        "--vocab",
        "/c/d.json",
    ]
    (run / "manifest.json").write_text(json.dumps(manifest))
    render_run([run], tmp_path / "out")
    table = (tmp_path / "out" / "table.md").read_text()
    subject = "Structured weights" if len(made) == 2 else f"{manifest['builds'][1]['name']}: structured weights"
    assert f"- {subject} of the model's shape" in table
    assert "acceptance of 0.87, not trained" in table
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("a known output, acceptance chosen as 0.87") == 1
    assert "0.31.0 with torch 9.9, triton 9.8" in page
    assert "SOME_SETTING=skip --vocab d.json" in page


def test_a_build_of_no_known_commit_claims_none(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", depths=(128,), launches=1, tokens=16)
    directory = RunDirectory(run)
    first, second = directory.manifest().builds
    unknown = second.model_copy(update={"git_commit": None, "git_dirty": None, "sources_sha256": "5eed" * 16})
    directory.update_manifest(builds=(first, unknown))
    runs = load_runs([run])
    (note,) = [note for note in general_notes(runs, speed_table(runs)) if note.title == "Builds"]
    ours = note.text.partition("kernarc: ")[2]
    assert "of no known commit (sources sha256 5eed5eed5eed)" in ours
    assert "0123456789ab" not in ours


def test_a_reduced_draft_head_is_stated_below_the_table(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", launches=1, requests_per_depth=1, depths=(128,), tokens=16)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["builds"][1] |= {"draft_vocab_size": 40960, "vocab_size": 248320}
    (run / "manifest.json").write_text(json.dumps(manifest))
    render_run([run], tmp_path / "out")
    for name in ("table.md", "index.html"):
        assert "draft head over 40,960 of 248,320 tokens" in (tmp_path / "out" / name).read_text(), name


def test_a_step_breakdown_is_drawn_where_the_run_has_one(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", launches=1, requests_per_depth=2, depths=(128,), tokens=16)
    render_run([run], tmp_path / "without")
    parts = [{"name": "GEMM <fp8>", "ms": 12.5}, {"name": "attention", "ms": 3.25}]
    profile = {"builds": {"kernarc": [{"depth": 128, "parts": parts}]}}
    (run / "step_profile.json").write_text(json.dumps(profile))
    render_run([run], tmp_path / "with")
    without, drawn = ((tmp_path / name / "index.html").read_text() for name in ("without", "with"))
    assert "no breakdown inside them" in without
    assert "GEMM &lt;fp8&gt; <b>12.50</b> ms" in drawn
    assert "attention <b>3.25</b> ms" in drawn
