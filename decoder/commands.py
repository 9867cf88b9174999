"""Commands of the bundled decoder: serve, generate, model. PyTorch is imported when a command runs, not for --help."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..harness.config.checkpoints import shipped_model, shipped_models
from .options import DIRECTORY, loading_options
from .server.fault_kinds import plant_help

SHIPPED_MODEL = "python-7m"


@click.command(epilog="\b\nTest plants, for tests of the gate only:\n" + plant_help())
@click.argument("model_dir", metavar="MODEL")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any free port.")
@loading_options
@click.option("--threads", type=click.IntRange(1), help="CPU threads of one step. [default: PyTorch's choice]")
@click.option("--max-context", type=click.IntRange(2), help="Prompt and output together. [default: the model's limit]")
@click.option("--served-model-name", metavar="NAME", help="Name in requests and answers. [default: MODEL]")
@click.option("--queue", "queue_limit", type=click.IntRange(0), default=4, show_default=True, help="Requests waiting.")
@click.option("--plant", "plants", multiple=True, metavar="NAME[=VALUE]", help="TEST PLANT: a fault on purpose, below.")
@click.option("--plant-seed", type=click.IntRange(0), default=0, show_default=True, help="Test plants repeat by it.")
@click.option("--json", "as_json", is_flag=True, help="When ready, one JSON object on stdout.")
def serve(model_dir: str, as_json: bool, **options: Any) -> None:
    """Serve a checkpoint: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, /tokenize.

    Greedy, one stream at a time; one server-sent event is one decoder step.
    """
    from .server.serve import ServeSettings, Serving
    from .server.serve import serve as run

    model_dir = str(shipped_model(model_dir) or model_dir)

    def ready(serving: Serving) -> None:
        drafts = f"{serving.num_speculative_tokens} drafts a step"
        line = f"serving {serving.model} at {serving.url}/v1 ({serving.device}, {drafts}, window {serving.max_context})"
        click.echo(line, err=True)
        if as_json:
            _print_json(asdict(serving))

    run(ServeSettings(model=model_dir, served_name=options.pop("served_model_name"), **options), ready)


@click.command()
@click.argument("words", metavar="[MODEL] PROMPT", nargs=-1, required=True)
@click.option("--max-tokens", type=click.IntRange(1), help="[default: until EOS or the end of the window]")
@loading_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of the text.")
def generate(words: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Continue PROMPT, greedily, printing text as it decodes.

    MODEL is a checkpoint directory, or the name of a shipped one (without it python-7m, which writes Python). Where it
    has no tokenizer, PROMPT is ids:1,2,3 and ids are printed. Ctrl-C keeps what came so far.
    """
    from .continuation import continue_prompt

    model_dir, prompt = _model_and_prompt(words)

    def show(text: str) -> None:
        if not as_json:
            click.echo(text, nl=False)
            sys.stdout.flush()

    result = continue_prompt(model_dir, prompt, show=show, **options)
    if as_json:
        _print_json(asdict(result))
    else:
        click.echo()
    click.echo(result.summary(), err=True)
    if result.interrupted:
        sys.exit(130)


def _model_and_prompt(words: tuple[str, ...]) -> tuple[Path, str]:
    """What `generate` was given: one word is a prompt for the model that ships, two are a model and a prompt."""
    if len(words) > 2:
        raise click.UsageError(f"one MODEL and one PROMPT, got {len(words)} words; quote a prompt that has spaces")
    if len(words) == 1 and (Path(words[0]) / "config.json").is_file():
        raise click.UsageError(f"{words[0]} is a model: what should it continue? Give a PROMPT after it")
    name, prompt = words if len(words) == 2 else (SHIPPED_MODEL, words[0])
    path = shipped_model(name) or Path(name)
    if not (path / "config.json").is_file():
        names = ", ".join(shipped_models())
        raise click.UsageError(f"{path / 'config.json'} does not exist: give a checkpoint's directory or {names}")
    return path, prompt


@click.group()
def model() -> None:
    """Make, inspect and quantise checkpoints."""


@model.command()
@click.option("--shape", required=True, metavar="tiny|27b|PATH", help="A named shape, or the path of a config.json.")
@click.option("--acceptance", type=click.FloatRange(0, 1), default=0.87, show_default=True, help="Drafts kept.")
@click.option("--fp8", is_flag=True, help="Store the large linears as block FP8, as the published checkpoints do.")
@click.option("--emitted", type=click.IntRange(2), metavar="E", help="Keep output and drafts within E tokens.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--out", type=DIRECTORY, required=True, metavar="DIR", help="A directory that does not exist yet.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def synth(shape: str, acceptance: float, fp8: bool, emitted: int | None, seed: int, out: Path, as_json: bool) -> None:
    """Write a structured checkpoint: any shape, a known greedy output, a chosen acceptance rate.

    Every engine runs it unchanged. Streams to disk: 27b --fp8 writes 31 GB and needs under 8 GiB of memory. With
    --emitted, draft_vocab.json beside it lists the E tokens for --draft-vocab.
    """
    from .checkpoint.synthetic import write_structured_checkpoint

    started, progress = time.monotonic(), _Progress("writing")
    n_bytes = write_structured_checkpoint(
        shape, out, acceptance=acceptance, fp8=fp8, seed=seed, emitted=emitted, on_bytes=progress.update
    )
    progress.close()
    _print_written(out, n_bytes, time.monotonic() - started, as_json)


@model.command()
@click.argument("model_dir", metavar="DIR", type=DIRECTORY)
@click.option("--depths", metavar="N,N,…", help="[default: 128,8192,32768,65536 as far as the window goes]")
@click.option("--num-speculative-tokens", type=click.IntRange(0), default=3, show_default=True, help="Drafts a step.")
@click.option("--draft-rows", type=click.IntRange(1), metavar="N", help="Rows of a reduced draft head. [default: all]")
@click.option("--bandwidth", "tb_per_s", type=click.FloatRange(min=1e-3), metavar="TB/S", help="Floor in ms.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def info(
    model_dir: Path,
    depths: str | None,
    num_speculative_tokens: int,
    draft_rows: int | None,
    tb_per_s: float | None,
    as_json: bool,
) -> None:
    """Shapes, parameters and bytes by part, and the bytes that one decoder step cannot avoid.

    Reads headers only. The floor counts weights, head reads, MTP, GDN state (lazy commit) and bf16 keys and values.
    """
    from .checkpoint.accounts import read_accounts, step_floor
    from .checkpoint.accounts_text import accounts_json, accounts_text

    model_dir = shipped_model(str(model_dir)) or model_dir
    config, accounts = read_accounts(model_dir)
    drafts, window = num_speculative_tokens if config.has_mtp else 0, config.max_position_embeddings
    floors = [
        step_floor(config, accounts, depth=depth, num_drafts=drafts, draft_rows=draft_rows)
        for depth in _depths(depths, window)
    ]
    if as_json:
        _print_json(accounts_json(str(model_dir), config, accounts, floors, tb_per_s))
    else:
        click.echo(accounts_text(str(model_dir), config, accounts, floors, tb_per_s))


@model.command()
@click.argument("source", metavar="SRC", type=DIRECTORY)
@click.argument("out", metavar="DST", type=DIRECTORY)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def quantize(source: Path, out: Path, as_json: bool) -> None:
    """Write the text model of SRC to DST as block FP8: e4m3 values, one bf16 scale a 128×128 block.

    Attention, GDN and MLP linears become FP8; head, embedding, mtp.fc, in_proj_a/b, conv and norms stay as they are.
    """
    from .checkpoint.quantize import quantize_checkpoint

    started, progress = time.monotonic(), _Progress("writing")
    n_bytes = quantize_checkpoint(source, out, on_bytes=progress.update)
    progress.close()
    _print_written(out, n_bytes, time.monotonic() - started, as_json)


@model.command("draft-vocab")
@click.argument("model_dir", metavar="MODEL", type=DIRECTORY)
@click.option("--from", "run_dirs", type=DIRECTORY, multiple=True, required=True, metavar="RUN_DIR", help="Repeatable.")
@click.option("--size", type=click.IntRange(1), default=40960, show_default=True, help="How many ids.")
@click.option("--out", type=DIRECTORY, required=True, metavar="FILE", help="The JSON file for --draft-vocab.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def draft_vocab(model_dir: Path, run_dirs: tuple[Path, ...], size: int, out: Path, as_json: bool) -> None:
    """Count the tokens that MODEL emitted in recorded runs; the most frequent become its draft vocabulary.

    Only builds that ran this very checkpoint count. Where fewer ids were seen, the lowest others fill it up.
    """
    from ..harness.config.checkpoints import Checkpoint
    from ..harness.run.agreement import outputs_of_model
    from .checkpoint.config import ModelConfig
    from .checkpoint.draft_vocabulary import count_outputs

    config = ModelConfig.from_directory(model_dir)
    outputs = outputs_of_model(run_dirs, Checkpoint(model_dir).sha256())
    source = f"outputs of {model_dir.resolve().name} in {', '.join(path.resolve().name for path in run_dirs)}"
    counted = count_outputs(outputs, size=size, vocab_size=config.vocab_size, source=source)
    counted.vocabulary.write(out)
    if as_json:
        facts = {"tokens": counted.outputs, "seen": counted.seen, "coverage": counted.coverage}
        _print_json({"path": str(out), "size": size, **facts})
    else:
        click.echo(
            f"{out}: {size:,} of {config.vocab_size:,} ids; {counted.seen:,} distinct ids were seen in "
            f"{counted.outputs:,} output tokens, and it holds {counted.coverage:.2%} of those tokens"
        )


def cpu_path() -> tuple[bool, str]:
    """(whether the decoder runs as C++ on this CPU, which path and why), for `doctor`."""
    from .native.library import describe_path

    return describe_path()


def _print_written(out: Path, n_bytes: int, seconds: float, as_json: bool) -> None:
    if as_json:
        _print_json({"path": str(out), "bytes": n_bytes, "seconds": round(seconds, 3)})
    else:
        click.echo(f"{out}: {n_bytes / 1e9:.3f} GB in {seconds:.1f} s")


def _depths(text: str | None, window: int) -> list[int]:
    if text is None:
        return [depth for depth in (128, 8192, 32768, 65536) if depth <= window]
    try:
        depths = [int(item) for item in text.split(",")]
    except ValueError:
        depths = [-1]
    if min(depths) < 0 or max(depths) > window:
        expected = f"expected depths such as 128,8192 within the window of {window}"
        raise click.BadParameter(f"{text!r}, {expected}", param_hint="--depths")
    return depths


class _Progress:
    """Percent done on stderr, once a second at most, only on a terminal."""

    def __init__(self, verb: str) -> None:
        self.verb, self.started, self.shown = verb, time.monotonic(), 0.0
        self.visible = sys.stderr.isatty()

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
