"""The page in a real Chromium: silent, self-contained, reachable by keyboard, whole at every width, accessible."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from kernarc.harness.run.storage import RunDirectory
from kernarc.reports.render import render_run
from playwright.sync_api import Browser, Page

from .conftest import MakeRun

pytestmark = pytest.mark.browser

WIDTHS = (360, 390, 480, 600, 601, 768, 860, 861, 1024, 1366, 1920)
A4_PIXELS = 718  # 190 mm at 96 dots an inch
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@contextmanager
def opened(browser: Browser, page_path: Path, **options: Any) -> Iterator[tuple[Page, list[str]]]:
    """The loaded page and everything it complained about or asked for beyond its own file."""
    context = browser.new_context(**options)
    page = context.new_page()
    heard: list[str] = []
    address = page_path.as_uri()
    page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.append(f"error: {error}"))
    page.on("request", lambda request: heard.append(f"request: {request.url}") if request.url != address else None)
    page.on("dialog", lambda dialog: heard.append(f"dialog: {dialog.message}"))
    page.goto(address)
    yield page, heard
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_console_message_and_no_request_while_everything_is_used(
    chromium: Browser, full_page: Path, scheme: str
) -> None:
    with opened(chromium, full_page, color_scheme=scheme) as (page, heard):
        page.click("#play")
        page.select_option("#depth", "0")
        page.check("#from-request")
        page.select_option("#speed", "4")
        page.click("#restart")
        page.hover(".chart.wide .point >> nth=2")
        page.wait_for_timeout(300)
        assert heard == []


def test_the_two_colour_schemes_differ(chromium: Browser, full_page: Path) -> None:
    seen = []
    for scheme in ("light", "dark"):
        with opened(chromium, full_page, color_scheme=scheme) as (page, _):
            seen.append(page.evaluate("getComputedStyle(document.querySelector('.sheet')).backgroundColor"))
    assert seen == ["rgb(253, 253, 251)", "rgb(15, 27, 39)"]


def test_nothing_overflows_at_any_width(chromium: Browser, full_page: Path) -> None:
    with opened(chromium, full_page) as (page, _):
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(OVERFLOW) <= 0, width


@pytest.mark.parametrize(("width", "chart"), [(1366, "wide"), (800, "medium"), (360, "narrow")])
def test_every_value_of_the_chart_is_reachable_by_keyboard_and_pointer(
    chromium: Browser, full_page: Path, width: int, chart: str
) -> None:
    with opened(chromium, full_page, viewport={"width": width, "height": 900}) as (page, _):
        points = page.locator(f".chart.{chart} .point")
        assert points.count() == 8
        points.first.focus()
        read = [page.inner_text("#readout")]
        for _ in range(7):
            page.keyboard.press("Tab")
            read.append(page.inner_text("#readout"))
        assert len(set(read)) == 8
        assert read[0].startswith("vllm, 128 tokens of context: ")
        assert read[7].startswith("kernarc, 65,536 tokens of context: ")
        page.keyboard.press("ArrowLeft")
        assert page.inner_text("#readout").startswith("kernarc, 32,768 tokens")
        page.keyboard.press("ArrowDown")
        assert page.inner_text("#readout").startswith("vllm, 32,768 tokens")
        points.nth(5).hover()
        assert page.inner_text("#readout").startswith("kernarc, 8,192 tokens")


@pytest.mark.parametrize("options", [
    {"color_scheme": "light"},
    {"color_scheme": "dark"},
    {"color_scheme": "dark", "viewport": {"width": 360, "height": 800}},
])  # fmt: skip
def test_axe_finds_no_serious_fault(chromium: Browser, full_page: Path, options: dict[str, Any]) -> None:
    with opened(chromium, full_page, **options) as (page, _):
        page.click("#play")
        page.wait_for_timeout(200)
        page.click("#play")
        found = Axe().run(page).response["violations"]
        assert [f"{each['id']}: {each['nodes'][0]['html']}" for each in found] == []


def test_landmarks_headings_and_tables_are_there_for_a_screen_reader(chromium: Browser, full_page: Path) -> None:
    with opened(chromium, full_page) as (page, _):
        assert page.get_by_role("main").count() == 1
        assert page.get_by_role("heading", level=1).count() == 1
        assert page.get_by_role("table", name="Table 1 Decode speed, one stream").count() == 1
        assert page.get_by_role("rowheader", name="65,536").count() == 2
        description = page.inner_text("#view-description")
        assert description.count("kernarc:") == 1
        assert "128, 8,192, 32,768, 65,536 tokens" in description


def test_print_shows_the_sheet_without_controls(chromium: Browser, full_page: Path) -> None:
    with opened(chromium, full_page) as (page, _):
        page.emulate_media(media="print")
        page.set_viewport_size({"width": A4_PIXELS, "height": 1000})
        assert page.evaluate(OVERFLOW) <= 0
        assert not page.is_visible("#controls")
        assert page.is_visible("table >> nth=0")
        assert page.inner_text(".tokens >> nth=0") == "256"
        assert page.pdf(format="A4").startswith(b"%PDF")


def test_the_page_tells_everything_without_scripts(chromium: Browser, full_page: Path, full_run: Path) -> None:
    with opened(chromium, full_page, java_script_enabled=False) as (page, _):
        assert not page.is_visible("#controls")
        assert page.inner_text(".lane >> nth=1 >> .tokens") == "256"
        shown = page.text_content(".lane >> nth=1 >> .text")
        request = (page.text_content("#race-caption") or "").split("request ")[2].split(",")[0]
        streams = [s for s in RunDirectory(full_run).streams() if s.request_id == request and s.build == "kernarc"]
        assert shown == streams[0].text


def test_a_checkpoint_without_text_shows_its_ids(chromium: Browser, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", with_text=False, launches=1, requests_per_depth=2, depths=(128,), tokens=32)
    render_run([run], tmp_path / "out")
    with opened(chromium, tmp_path / "out" / "index.html") as (page, heard):
        request = page.inner_text("#race-caption").split("request ")[2].split(",")[0]
        stream = next(s for s in RunDirectory(run).streams() if s.request_id == request and s.build == "kernarc")
        shown = page.text_content(".lane >> nth=1 >> .text") or ""
        assert [int(word) for word in shown.split()] == list(stream.token_ids)
        assert page.is_visible("#race-ids")
        assert heard == []


def test_a_run_without_any_speed_still_makes_a_sound_page(chromium: Browser, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", launches=1, requests_per_depth=2, depths=(128,), tokens=16, checked=False)
    render_run([run], tmp_path / "out")
    with opened(chromium, tmp_path / "out" / "index.html") as (page, heard):
        assert "no speed" in page.inner_text("h1")
        assert "outputs not checked" in page.inner_text("table >> nth=0")
        assert Axe().run(page).violations_count == 0
        assert heard == []
