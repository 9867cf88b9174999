"""What a person sees while a comparison runs."""

import io
from collections.abc import Callable

from kernarc.gates.compare import Measured, evaluate
from kernarc.gates.config import GateConfig
from kernarc.gates.display import GateDisplay
from kernarc.harness.run.records import RunManifest, StreamRecord
from rich.console import Console

MakeStream = Callable[..., StreamRecord]


def test_estimates_close_in_launch_by_launch(make_stream: MakeStream, made_up_manifest: RunManifest) -> None:
    screen = io.StringIO()
    config = GateConfig(depths=(128,), n_resamples=1000)
    manifest = made_up_manifest.model_copy(update={"depths": (128,), "requests_per_depth": 2})
    streams = [
        make_stream(build, launch=launch, request=request, step_ms=step + 0.01 * request + 0.02 * launch)
        for launch in range(3)
        for request in range(2)
        for build, step in (("a", 10.0), ("b", 10.5))
    ]
    with GateDisplay(Console(file=screen, width=120)) as display:
        for launches in (1, 2, 3):
            display.launch_done(evaluate(Measured(manifest, streams, launches), config))
    lines = screen.getvalue().splitlines()
    assert lines[0].startswith("after 1 launches: 128: +5.")
    assert lines[0].endswith("(…)")  # one launch has no interval that decides
    assert lines[2].startswith("after 3 launches: 128: +4.9")
    assert " to " in lines[2]


def test_live_table_shows_this_launchs_preview(make_stream: MakeStream) -> None:
    screen = io.StringIO()
    with GateDisplay(Console(file=screen, width=120, force_terminal=True)) as display:
        display._baseline, display._candidate, display._depths = "a", "b", (128,)
        for request in range(4):
            for build, step in (("a", 10.0 + 0.1 * request), ("b", 11.0 + 0.2 * request)):
                display.stream_done(make_stream(build, request=request, step_ms=step))
        Console(file=screen, width=120).print(display._table())
    text = screen.getvalue()
    assert "b against a: time per token" in text
    assert "+11." in text
