"""Where a decoder step's time goes, without a server: `python -m kernarc.decoder.bench MODEL`.

For each depth: prefill tokens a second, time to first token, milliseconds a step with and without drafts, and the share
of drafting, verification and the heads in a step with drafts. Medians of `--steps` steps; the plain PyTorch session.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import torch

from .errors import DecoderError
from .generate import Decoder
from .session import TorchSession

WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One depth's figures."""

    depth: int
    ttft_ms: float
    step_ms: float
    fast_step_ms: float  # the fastest tenth: what the machine does undisturbed
    plain_step_ms: float  # without drafts
    tokens_per_step: float
    draft_share: float  # of the step, its heads included
    verify_share: float  # of the step, its head included
    head_share: float  # of the step, all heads

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


def measure(session: TorchSession, depth: int, num_drafts: int, steps: int) -> Row:
    """One depth: a prefill of random ids, then `steps` steps with drafts, and as many without."""
    generator = torch.Generator().manual_seed(depth)
    prompt = torch.randint(0, session.model.embedding.shape[0], (depth,), generator=generator).tolist()
    start = time.perf_counter()
    session.prefill(prompt)
    ttft = time.perf_counter() - start
    step_times, tokens = _run(session, num_drafts, steps)
    shares = _shares(session, num_drafts, steps)
    plain_times, _ = _run(session, 0, steps)
    return Row(
        depth=depth,
        ttft_ms=1e3 * ttft,
        step_ms=1e3 * statistics.median(step_times),
        fast_step_ms=1e3 * statistics.quantiles(step_times, n=10)[0],
        plain_step_ms=1e3 * statistics.median(plain_times),
        tokens_per_step=tokens / steps,
        draft_share=shares[0],
        verify_share=shares[1],
        head_share=shares[2],
    )


def _run(session: TorchSession, num_drafts: int, steps: int) -> tuple[list[float], int]:
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


def _shares(session: TorchSession, num_drafts: int, steps: int) -> tuple[float, float, float]:
    """Shares of a step: (drafting, verification, heads); the heads are part of the first two."""
    model = session.model
    with (
        Stopwatch(session, "step") as step,
        Stopwatch(session, "draft") as draft,
        Stopwatch(model, "forward") as forward,
        Stopwatch(model, "logits") as heads,
    ):
        _run(session, num_drafts, steps)
    verify = forward.seconds + heads.seconds / (num_drafts + 1)
    return draft.seconds / step.seconds, verify / step.seconds, heads.seconds / step.seconds


def render(rows: list[Row], num_drafts: int) -> str:
    """A table, one line a depth."""
    header = (
        f"{'depth':>7} {'prefill tok/s':>14} {'TTFT ms':>9} {'ms/step':>8} {'p10':>6} {'tok/step':>9} {'ms/token':>9} "
        f"{'k=0 ms':>7} {'draft':>6} {'verify':>7} {'heads':>6}   (k = {num_drafts})"
    )
    lines = [
        f"{row.depth:>7} {1e3 * row.depth / row.ttft_ms:>14.0f} {row.ttft_ms:>9.1f} {row.step_ms:>8.2f} "
        f"{row.fast_step_ms:>6.2f} {row.tokens_per_step:>9.2f} {row.tpot_ms:>9.3f} {row.plain_step_ms:>7.2f} "
        f"{row.draft_share:>6.0%} {row.verify_share:>7.0%} {row.head_share:>6.0%}"
        for row in rows
    ]
    return "\n".join([header, *lines])


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.option("--depths", default="128,1024,4096,8192", show_default=True, help="Prompt lengths in tokens.")
@click.option("--num-speculative-tokens", default=3, show_default=True, type=click.IntRange(0, 8))
@click.option("--steps", default=100, show_default=True, type=click.IntRange(min=10), help="Steps a figure.")
@click.option("--threads", type=click.IntRange(min=1), help="PyTorch threads; its own choice unless given.")
def main(model: str, depths: str, num_speculative_tokens: int, steps: int, threads: int | None) -> None:
    """Measure the decoder on MODEL on this CPU."""
    if threads:
        torch.set_num_threads(threads)
    try:
        decoder = Decoder.load(model, device="cpu", num_speculative_tokens=num_speculative_tokens)
    except DecoderError as error:
        raise click.ClickException(str(error)) from error
    assert isinstance(decoder.session, TorchSession), "device cpu gives the plain PyTorch session"
    click.echo(f"torch {torch.__version__} threads={torch.get_num_threads()} {torch.backends.cpu.get_cpu_capability()}")
    measure(decoder.session, 64, num_speculative_tokens, 10)  # pages, threads and the allocator warm up
    rows = [measure(decoder.session, int(depth), num_speculative_tokens, steps) for depth in depths.split(",")]
    click.echo(render(rows, num_speculative_tokens))


if __name__ == "__main__":
    main()
