"""Synthetic run directories: known step times, speculative steps of known sizes, text with markup, emoji and splits."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kernarc.gates.outcomes import OutputOutcome, Verdict
from kernarc.harness.records import (
    BuildRecord,
    Environment,
    LaunchRecord,
    RunManifest,
    StreamRecord,
    StreamStatus,
    TokenEvent,
    Usage,
)
from kernarc.harness.storage import RunDirectory
from kernarc.reports.render import render_run
from playwright.sync_api import Browser, sync_playwright

DEPTHS = (128, 8192, 32768, 65536)
STEP_MS = {"vllm": (27.9, 28.1, 46.3, 67.4), "kernarc": (20.1, 16.9, 15.3, 20.9)}
PIECES = (
    "def ", "merge", "(left", ", right", "):\n", "    ", "if ", "x < y", " && ", "</script>", "<b>bold</b>", "<!--",
    "\u2028", "'quoted'", '"', "naïve ", "日本", "語", "🚀", "👩‍", "💻", "\ufffd", "\\n", "return ", "0", ";", "\n",
    "<img src=x onerror=alert(1)>", "{{ 7*7 }}", "]]>", "\t", "…",
)  # fmt: skip

CHROMIUM_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip

MakeRun = Callable[..., Path]


def build_record(name: str) -> BuildRecord:
    return BuildRecord(
        name=name,
        engine="vllm" if name.startswith("vllm") else "kernarc",
        engine_version="0.31.0" if name.startswith("vllm") else "0.1.0",
        command=("serve", "model", "--port", "8000"),
        model="tiny-structured",
        model_sha256="ab" * 32,
        num_speculative_tokens=3,
        git_commit="0123456789abcdef0123456789abcdef01234567",
        git_dirty=False,
    )


def environment() -> Environment:
    return Environment(
        hostname="bench-1",
        platform="Linux 6.1 x86_64",
        cpu_model="Example CPU",
        cpu_count=16,
        cpu_governor="performance",
        memory_total_bytes=64 << 30,
        gpu_name="NVIDIA A100-SXM4-80GB",
        gpu_driver="570.10",
        gpu_memory_bytes=80 << 30,
        python_version="3.11.9",
        library_versions={"torch": "2.13.0", "transformers": "5.17.0"},
        kernarc_version="0.1.0",
        git_commit="0123456789abcdef0123456789abcdef01234567",
        git_dirty=False,
    )


def stream_record(
    build: str,
    depth: int,
    step_ms: float,
    *,
    launch: int,
    number: int,
    tokens: int,
    with_text: bool,
    rng: random.Random,
) -> StreamRecord:
    """A speculative stream: steps of one to four tokens, `step_ms` apart with a little noise."""
    sent = 1_000_000_000 * (1 + launch * 1000 + number)
    t_ns = sent + round(depth * 2_000 + 5e6)
    events: list[TokenEvent] = []
    left = tokens
    text_rng = random.Random(f"{depth}/{launch}/{number}")
    while left:
        size = min(left, 1 if not events else rng.choice((1, 3, 4, 4, 4)))
        ids = tuple(text_rng.randrange(1000) for _ in range(size))
        text = "".join(PIECES[token % len(PIECES)] for token in ids) if with_text else ""
        events.append(TokenEvent(t_ns=t_ns, token_ids=ids, text=text))
        t_ns += round(step_ms * 1e6 * (1 + rng.gauss(0, 0.02)))
        left -= size
    return StreamRecord(
        build=build,
        depth=depth,
        launch=launch,
        block=number // 2,
        slot=number,
        request_id=f"d{depth}-l{launch}-r{number}",
        request_sha256="cd" * 32,
        prompt_ids_sha256="ef" * 32,
        max_tokens=tokens,
        sent_ns=sent,
        connect_ns=0,
        ended_ns=events[-1].t_ns + 1_000_000,
        wall_utc="2026-10-14T09:00:00+00:00",
        events=tuple(events),
        events_are_steps=True,
        usage=Usage(prompt_tokens=depth, completion_tokens=tokens, cached_tokens=0),
        finish_reason="length",
        status=StreamStatus.OK,
    )


def write_check(path: Path, builds: tuple[str, ...], **failed: str) -> None:
    """check.json as `kernarc-gate check` writes it; `failed` names builds with the reason they failed for."""
    streams = RunDirectory(path).streams()
    outcomes = []
    for name in builds:
        counted = [s for s in streams if s.build == name and s.status is StreamStatus.OK]
        positions = sum(len(s.token_ids) for s in counted)
        outcome = OutputOutcome(
            build=name,
            verdict=Verdict.FAIL if name in failed else Verdict.PASS,
            reason=failed.get(name, "every emitted token is the reference's choice or a near-tie"),
            streams=len(counted),
            positions=positions,
            matches=positions,
        )
        outcomes.append(outcome.model_dump(mode="json"))
    (path / "check.json").write_text(json.dumps({"output_checks": outcomes}), encoding="utf-8")


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    """`make_run(path, …)` writes a run directory of synthetic streams and returns its path."""

    def make(
        path: Path,
        *,
        builds: tuple[str, ...] = ("vllm", "kernarc"),
        depths: tuple[int, ...] = DEPTHS,
        launches: int = 5,
        requests_per_depth: int = 8,
        tokens: int = 256,
        with_text: bool = True,
        checked: bool = True,
        scale: float = 1.0,
        run_id: str = "run-0001",
        kind: str = "bench",
        planned_launches: int | None = None,
        created_utc: str = "2026-10-14T09:00:00.000+00:00",
        change: Callable[[StreamRecord], StreamRecord | None] = lambda stream: stream,
        shuffle: int | None = None,
        seed: int = 7,
    ) -> Path:
        manifest = RunManifest(
            run_id=run_id,
            kind=kind,
            created_utc=created_utc,
            config_name="default",
            config_yaml="depths: [128]\n",
            builds=tuple(build_record(name) for name in builds),
            depths=depths,
            requests_per_depth=requests_per_depth,
            max_tokens=tokens,
            seed=seed,
            launches=planned_launches or launches,
            residency="both",
            requests_sha256="01" * 32,
            prompt_source="stdlib text",
            environment=environment(),
            launch_records=tuple(
                LaunchRecord(build=name, launch=launch, ready_s=2.0) for name in builds for launch in range(launches)
            ),
            finished_utc=created_utc,
        )
        directory = RunDirectory(path).create(manifest)
        rng = random.Random(seed)
        streams: list[StreamRecord] = []
        for index, depth in enumerate(depths):
            for launch in range(launches):
                luck = {name: 1 + rng.gauss(0, 0.005) for name in builds}
                for number in range(requests_per_depth):
                    for name in builds:
                        step = STEP_MS[name.split("-")[0]][index % 4] * scale * luck[name]
                        stream = change(
                            stream_record(
                                name, depth, step,
                                launch=launch, number=number, tokens=tokens, with_text=with_text, rng=rng,
                            )
                        )  # fmt: skip
                        if stream is not None:
                            streams.append(stream)
        if shuffle is not None:
            random.Random(shuffle).shuffle(streams)
        directory.streams_path.write_text("".join(s.model_dump_json() + "\n" for s in streams), encoding="utf-8")
        if checked:
            write_check(path, builds)
        return path

    return make


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
