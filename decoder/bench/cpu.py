"""Where a decoder step's time goes, without a server: `python -m kernarc.decoder.bench.cpu MODEL`.

For each depth and each path on this CPU, C++ and plain PyTorch: time to first token, milliseconds a step with and
without drafts, the share of drafting. Then the ratio of the two. Medians of `--steps` steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import torch

from ..cpu.session import TorchSession
from ..errors import DecoderError
from ..generate import Decoder
from ..native.build import NativeUnavailableError
from ..native.session import NativeSession
from .reading_options import reading_options

WARM_UP_STEPS = 5
PREFILLS = 3

CpuSession = TorchSession | NativeSession


@dataclass(frozen=True, slots=True)
class Row:
    """One depth's figures on one path."""

    path: str
    depth: int
    ttft_ms: float  # the fastest of PREFILLS
    step_ms: float
    fast_step_ms: float  # the fastest tenth: what the machine does undisturbed
    plain_step_ms: float  # without drafts
    tokens_per_step: float
    draft_share: float  # of the step, its heads included

    @property
    def tpot_ms(self) -> float:
        """Milliseconds a token with drafts."""
        return self.step_ms / self.tokens_per_step


class Stopwatch:
    """Sums the time spent in one method of an object while it is open."""

    def __init__(self, owner: object, method: str) -> None:
        self.owner, self.method = owner, method
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        timed: Callable[..., Any] = getattr(self.owner, self.method)

        def wrapped(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = timed(*arguments)
            self.seconds += time.perf_counter() - start
            return result

        setattr(self.owner, self.method, wrapped)
        return self

    def __exit__(self, *_: object) -> None:
        delattr(self.owner, self.method)


def measure(session: CpuSession, vocab_size: int, depth: int, num_drafts: int, steps: int) -> Row:
    """One depth: prefills of random ids, then `steps` steps with drafts, and as many without."""
    generator = torch.Generator().manual_seed(depth)
    prompt = torch.randint(0, vocab_size, (depth,), generator=generator).tolist()
    prefill_times = []
    for _ in range(PREFILLS):
        start = time.perf_counter()
        session.prefill(prompt)
        prefill_times.append(time.perf_counter() - start)
    step_times, tokens = _run(session, num_drafts, steps)
    with Stopwatch(session, "step") as step, Stopwatch(session, "draft") as draft:
        _run(session, num_drafts, steps)
    plain_times, _ = _run(session, 0, steps)
    return Row(
        path="C++" if isinstance(session, NativeSession) else "PyTorch",
        depth=depth,
        ttft_ms=1e3 * min(prefill_times),
        step_ms=1e3 * statistics.median(step_times),
        fast_step_ms=1e3 * statistics.quantiles(step_times, n=10)[0],
        plain_step_ms=1e3 * statistics.median(plain_times),
        tokens_per_step=tokens / steps,
        draft_share=draft.seconds / step.seconds,
    )


def _run(session: CpuSession, num_drafts: int, steps: int) -> tuple[list[float], int]:
    """(seconds of each step, tokens of all)."""
    for _ in range(WARM_UP_STEPS):
        session.step(num_drafts)
    times, tokens = [], 0
    for _ in range(steps):
        start = time.perf_counter()
        new, _ = session.step(num_drafts)
        times.append(time.perf_counter() - start)
        tokens += len(new)
    return times, tokens


def render(rows: list[Row], num_drafts: int) -> str:
    """A table, one line a depth and path; after two paths of one depth, how many times faster the first is."""
    header = (
        f"{'depth':>7} {'path':>8} {'prefill tok/s':>14} {'TTFT ms':>9} {'ms/step':>8} {'p10':>6} {'tok/step':>9} "
        f"{'ms/token':>9} {'k=0 ms':>7} {'draft':>6}   (k = {num_drafts})"
    )
    lines = [header]
    for before, row in zip([None, *rows], rows, strict=False):
        lines.append(
            f"{row.depth:>7} {row.path:>8} {1e3 * row.depth / row.ttft_ms:>14.0f} {row.ttft_ms:>9.1f} "
            f"{row.step_ms:>8.3f} {row.fast_step_ms:>6.3f} {row.tokens_per_step:>9.2f} {row.tpot_ms:>9.4f} "
            f"{row.plain_step_ms:>7.3f} {row.draft_share:>6.0%}"
        )
        if before is not None and before.depth == row.depth:
            ttft, step, tpot = (
                f"x{getattr(row, name) / getattr(before, name):.1f}" for name in ("ttft_ms", "step_ms", "tpot_ms")
            )
            lines.append(f"{row.depth:>7} {'ratio':>8} {'':>14} {ttft:>9} {step:>8} {'':>6} {'':>9} {tpot:>9}")
    return "\n".join(lines)


def _sessions(model: str, paths: str, **options: int | None) -> list[tuple[CpuSession, int]]:
    """(session, vocabulary) of each path; without a compiler only plain PyTorch, and a line that says why.

    options: those of SessionOptions.
    """
    sessions: list[tuple[CpuSession, int]] = []
    for native in (True, False):
        if paths != "both" and paths != ("native" if native else "plain"):
            continue
        try:
            decoder = Decoder.load(model, device="cpu", native=native, **options)
        except NativeUnavailableError as error:
            if paths == "native":
                raise
            click.echo(f"no C++ path: {error}", err=True)
            continue
        assert isinstance(decoder.session, CpuSession), "device cpu gives one of the two"
        sessions.append((decoder.session, decoder.config.vocab_size))
    return sessions


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.option("--depths", default="128,1024,4096,8192", show_default=True, help="Prompt lengths in tokens.")
@click.option("--num-speculative-tokens", default=3, show_default=True, type=click.IntRange(0, 8))
@reading_options
@click.option("--steps", default=100, show_default=True, type=click.IntRange(min=10), help="Steps a figure.")
@click.option("--threads", type=click.IntRange(min=1), help="PyTorch threads; its own choice unless given.")
@click.option("--path", "paths", type=click.Choice(["both", "native", "plain"]), default="both", show_default=True)
def main(
    model: str,
    depths: str,
    num_speculative_tokens: int,
    steps: int,
    threads: int | None,
    paths: str,
    **reading: int | None,
) -> None:
    """Measure the decoder on MODEL on this CPU."""
    if threads:
        torch.set_num_threads(threads)
    try:
        sessions = _sessions(model, paths, num_speculative_tokens=num_speculative_tokens, **reading)
    except DecoderError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"torch {torch.__version__} threads={torch.get_num_threads()} {torch.backends.cpu.get_cpu_capability()}")
    for session, vocab_size in sessions:
        measure(session, vocab_size, 64, num_speculative_tokens, 10)  # pages, threads and the allocator warm up
    rows = [
        measure(session, vocab_size, int(depth), num_speculative_tokens, steps)
        for depth in depths.split(",")
        for session, vocab_size in sessions
    ]
    click.echo(render(rows, num_speculative_tokens))


if __name__ == "__main__":
    main()
