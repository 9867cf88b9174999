"""Commands of the bundled decoder: serve, generate, model. Heavy imports wait until a command runs."""

import json
import time
from pathlib import Path
from typing import Any

import click

DIRECTORY = click.Path(path_type=Path)


@click.group()
def model() -> None:
    """Make, inspect and quantise checkpoints."""


@model.command()
@click.option("--shape", required=True, metavar="tiny|27b|PATH", help="A named shape, or the path of a config.json.")
@click.option("--acceptance", type=click.FloatRange(0, 1), default=0.87, show_default=True, help="Drafts kept.")
@click.option("--fp8", is_flag=True, help="Store the large linears as block FP8, as the published checkpoints do.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--out", type=DIRECTORY, required=True, metavar="DIR", help="A directory that does not exist yet.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def synth(shape: str, acceptance: float, fp8: bool, seed: int, out: Path, as_json: bool) -> None:
    """Write a structured checkpoint: any shape, a known greedy output, a chosen acceptance rate.

    Every engine runs it unchanged. Streams to disk: 27b --fp8 writes 31 GB and needs under 8 GiB of memory.
    """
    from .decoder.synthetic import write_structured_checkpoint

    started = time.monotonic()
    progress = _Progress("writing")
    n_bytes = write_structured_checkpoint(
        shape, out, acceptance=acceptance, fp8=fp8, seed=seed, on_bytes=progress.update
    )
    progress.close()
    seconds = time.monotonic() - started
    if as_json:
        click.echo(json.dumps({"path": str(out), "bytes": n_bytes, "seconds": round(seconds, 3)}))
    else:
        click.echo(f"{out}: {n_bytes / 1e9:.3f} GB in {seconds:.1f} s")


class _Progress:
    """Percent done on stderr, once a second at most, only on a terminal."""

    def __init__(self, verb: str) -> None:
        self.verb, self.started, self.shown = verb, time.monotonic(), 0.0
        self.visible = click.get_text_stream("stderr").isatty()

    def update(self, done: int, total: int) -> None:
        """Shows done of total bytes and the time left at the present rate."""
        now = time.monotonic()
        if self.visible and now - self.shown >= 1:
            left = (now - self.started) * (total - done) / max(done, 1)
            line = f"\r{self.verb} {done / total:4.0%} of {total / 1e9:.1f} GB, {left:.0f} s left "
            click.echo(line, nl=False, err=True)
            self.shown = now

    def close(self) -> None:
        """Ends the line."""
        if self.visible and self.shown:
            click.echo("", err=True)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value))
