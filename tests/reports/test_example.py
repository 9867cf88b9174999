"""The example run in the repository still renders to the very files beside it."""

from pathlib import Path

import pytest
from kernarc.reports.render import render_run

EXAMPLES = Path(__file__).parents[2] / "reports" / "examples"


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in EXAMPLES.glob("*/manifest.json")), ids=lambda p: p.name
)
def test_the_records_render_to_the_committed_files(folder: Path, tmp_path: Path) -> None:
    render_run([folder], tmp_path)
    for name in ("table.md", "speed.svg", "index.html"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name
