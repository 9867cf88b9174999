"""Fixtures: runs written by synthetic.py, the page of the full one, and a real Chromium."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kernarc.reports.render import render_run
from playwright.sync_api import Browser, sync_playwright

from ..fakes.runs import SyntheticRun

CHROMIUM_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip

MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    """`make_run(path, …)` writes a run directory of synthetic streams and returns its path."""
    return lambda path, **options: SyntheticRun(**options).write(path)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Headless Chromium, from KERNARC_CHROMIUM or the path; browser tests are skipped only where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("KERNARC_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium: install Debian's chromium or set KERNARC_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def full_page(full_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """index.html of the full run."""
    folder = tmp_path_factory.mktemp("published")
    render_run([full_run], folder)
    return folder / "index.html"


@pytest.fixture(scope="session")
def full_run(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 depths × 2 builds × 40 streams × 256 tokens."""
    return make_run(tmp_path_factory.mktemp("runs") / "full")
