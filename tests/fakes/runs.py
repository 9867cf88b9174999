"""Synthetic run directories: known step times, speculative steps of known sizes, text with markup, emoji and splits."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernarc.gates.outcomes import OutputOutcome, Verdict
from kernarc.harness.run.records import (
    BuildRecord,
    Environment,
    LaunchRecord,
    RunManifest,
    StreamRecord,
    StreamStatus,
    TokenEvent,
    Usage,
)
from kernarc.harness.run.storage import RunDirectory

DEPTHS = (128, 8192, 32768, 65536)
STEP_MS = {"vllm": (27.9, 28.1, 46.3, 67.4), "kernarc": (20.1, 16.9, 15.3, 20.9)}
PIECES = (
    "def ", "merge", "(left", ", right", "):\n", "    ", "if ", "x < y", " && ", "</script>", "<b>bold</b>", "<!--",
    "\u2028", "'quoted'", '"', "naïve ", "日本", "語", "🚀", "👩‍", "💻", "\ufffd", "\\n", "return ", "0", ";", "\n",
    "<img src=x onerror=alert(1)>", "{{ 7*7 }}", "]]>", "\t", "…",
)  # fmt: skip


@dataclass(frozen=True)
class SyntheticRun:
    """What to write; the defaults are 4 depths × 2 builds × 40 streams × 256 tokens.

    scale: of every step time. change: of each stream, None drops it. shuffle: a seed for the order on disk.
    """

    builds: tuple[str, ...] = ("vllm", "kernarc")
    depths: tuple[int, ...] = DEPTHS
    launches: int = 5
    requests_per_depth: int = 8
    tokens: int = 256
    with_text: bool = True
    checked: bool = True
    scale: float = 1.0
    run_id: str = "run-0001"
    kind: str = "bench"
    planned_launches: int | None = None
    created_utc: str = "2026-10-14T09:00:00.000+00:00"
    change: Callable[[StreamRecord], StreamRecord | None] = lambda stream: stream
    shuffle: int | None = None
    seed: int = 7

    def write(self, path: Path) -> Path:
        """A run directory with manifest, streams and, where checked, check.json."""
        directory = RunDirectory(path).create(self._manifest())
        streams = [changed for stream in self._streams() if (changed := self.change(stream)) is not None]
        if self.shuffle is not None:
            random.Random(self.shuffle).shuffle(streams)
        directory.streams_path.write_text("".join(s.model_dump_json() + "\n" for s in streams), encoding="utf-8")
        if self.checked:
            write_check(path, self.builds)
        return path

    def _manifest(self) -> RunManifest:
        launches = [(name, launch) for name in self.builds for launch in range(self.launches)]
        return RunManifest(
            run_id=self.run_id,
            kind=self.kind,
            created_utc=self.created_utc,
            config_name="default",
            config_yaml="depths: [128]\n",
            builds=tuple(build_record(name) for name in self.builds),
            depths=self.depths,
            requests_per_depth=self.requests_per_depth,
            max_tokens=self.tokens,
            seed=self.seed,
            launches=self.planned_launches or self.launches,
            residency="both",
            requests_sha256="01" * 32,
            prompt_source="stdlib text",
            environment=environment(),
            launch_records=tuple(LaunchRecord(build=name, launch=launch, ready_s=2.0) for name, launch in launches),
            finished_utc=self.created_utc,
        )

    def _streams(self) -> Iterator[StreamRecord]:
        rng = random.Random(self.seed)
        for index, depth in enumerate(self.depths):
            for launch in range(self.launches):
                luck = {name: 1 + rng.gauss(0, 0.005) for name in self.builds}
                for number in range(self.requests_per_depth):
                    for name in self.builds:
                        step = STEP_MS[name.split("-")[0]][index % 4] * self.scale * luck[name]
                        yield stream_record(
                            name, depth, step,
                            launch=launch, number=number, tokens=self.tokens, with_text=self.with_text, rng=rng,
                        )  # fmt: skip


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
