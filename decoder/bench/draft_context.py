"""What a draft context and a draft window cost and save: `python -m kernarc.decoder.bench.draft_context MODEL`.

MODEL is a folder with a tokenizer and a heldout.json, as the model that ships. Prompts are excerpts of its held-out
text; each is continued greedily with every setting, so all are compared on the same prompts and the same output: tokens
a step and milliseconds a token, and their ratios to an MTP head that reads the whole prompt, finished (mean of ln,
bootstrap over prompts).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer

from ..draft_context import ALL, CPU_DRAFT_CONTEXT, WHOLE_PROMPT, DraftReading
from ..errors import DecoderError
from ..generate import Decoder
from ..training.heldout import HeldOutText, prompts
from .cpu import CpuSession

RESAMPLES = 10_000
HEADER = (
    f"{'depth':>7} {'window':>7} {'context':>8} {'tok/step':>9} {'against all [95 %]':>27} {'TTFT ms':>9} "
    f"{'ms/step':>8} {'ms/token against all':>27}"
)


@dataclass(frozen=True, slots=True)
class Continuation:
    """One prompt continued with one setting. token_ids: the new ones, the prefill's first."""

    token_ids: list[int]
    steps: int
    ttft_ms: float
    step_ms: float  # the median

    @property
    def tokens_per_step(self) -> float:
        """The prefill's token is no step's."""
        return (len(self.token_ids) - 1) / self.steps

    @property
    def tpot_ms(self) -> float:
        """Milliseconds a token."""
        return self.step_ms / self.tokens_per_step


def continue_with(
    session: CpuSession, setting: DraftReading, prompt_ids: Sequence[int], num_drafts: int, new_tokens: int
) -> Continuation:
    """At least `new_tokens` greedy tokens after the prompt, whole steps of `num_drafts` drafts each."""
    session.reading = setting
    start = time.perf_counter()
    token_ids = [session.prefill(prompt_ids)]
    ended = [time.perf_counter()]
    while len(token_ids) < new_tokens:
        token_ids += session.step(num_drafts)[0]
        ended.append(time.perf_counter())
    step_ms = 1e3 * statistics.median(after - before for before, after in pairwise(ended))
    return Continuation(token_ids, len(ended) - 1, 1e3 * (ended[0] - start), step_ms)


def ratio_to(
    baseline: Sequence[Continuation], other: Sequence[Continuation], figure: str
) -> tuple[float, float, float]:
    """A figure of `other` over the baseline's on the same prompts, as (point, low, high) − 1, 95 %."""
    pairs = zip(baseline, other, strict=True)
    logs = torch.tensor([getattr(b, figure) / getattr(a, figure) for a, b in pairs], dtype=torch.float64).log()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(logs), (RESAMPLES, len(logs)), generator=generator)
    low, high = logs[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).expm1().tolist()
    return float(logs.mean().expm1()), low, high


def check_same_output(all_read: Sequence[Continuation], other: Sequence[Continuation], depth: int) -> None:
    """Drafts change how many tokens come a step, never which. Raises DecoderError."""
    for place, (one, two) in enumerate(zip(all_read, other, strict=True)):
        common = min(len(one.token_ids), len(two.token_ids))
        if one.token_ids[:common] != two.token_ids[:common]:
            raise DecoderError(f"prompt {place} at depth {depth} continues otherwise with another setting")


def measure_depth(
    session: CpuSession, excerpts: Sequence[Sequence[int]], settings: Sequence[DraftReading], num_drafts: int, new: int
) -> dict[DraftReading, list[Continuation]]:
    """Every excerpt with every setting, one after the other for one excerpt, so that the machine's mood is shared."""
    found: dict[DraftReading, list[Continuation]] = {setting: [] for setting in settings}
    for excerpt in excerpts:
        for setting in settings:
            found[setting].append(continue_with(session, setting, excerpt, num_drafts, new))
    return found


def row(depth: int, setting: DraftReading, runs: Sequence[Continuation], baseline: Sequence[Continuation]) -> str:
    """One line of the table."""
    window, context = (ALL if count is None else str(count) for count in (setting.window, setting.context))
    ratios = []
    for figure in ("tokens_per_step", "tpot_ms"):
        point, low, high = ratio_to(baseline, runs, figure)
        ratios.append("" if setting == WHOLE_PROMPT else f"{point:+.2%} [{low:+.2%}, {high:+.2%}]")
    tokens = sum(len(run.token_ids) - 1 for run in runs) / sum(run.steps for run in runs)
    ttft, step = (statistics.median(getattr(run, figure) for run in runs) for figure in ("ttft_ms", "step_ms"))
    columns = f"{depth:>7} {window:>7} {context:>8} {tokens:>9.3f} {ratios[0]:>27} {ttft:>9.1f} {step:>8.3f}"
    return f"{columns} {ratios[1]:>27}".rstrip()


def settings_at(depth: int, contexts: Sequence[int], windows: Sequence[int]) -> list[DraftReading]:
    """What is compared at a depth: everything read and finished, fewer positions finished, fewer read at all."""
    shorter = [DraftReading(context=context) for context in contexts if context < depth]
    narrower = [DraftReading(window, min(window, CPU_DRAFT_CONTEXT)) for window in windows if window < depth]
    return [WHOLE_PROMPT, *shorter, *narrower]


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--depths", default="1024,4096,8192", show_default=True, help="Prompt lengths in tokens.")
@click.option("--contexts", default="1,64,256,512,1024", show_default=True, help="Draft contexts, window all.")
@click.option("--windows", default="512,1024,2048", show_default=True, help="Draft windows, the default context.")
@click.option("--prompts", "count", default=48, show_default=True, type=click.IntRange(2), help="A depth.")
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(8), help="New tokens a prompt.")
@click.option("--num-speculative-tokens", "drafts", default=3, show_default=True, type=click.IntRange(1, 8))
@click.option("--seed", default=0, show_default=True, help="Of the excerpts' places.")
def main(
    model: Path, depths: str, contexts: str, windows: str, count: int, max_tokens: int, drafts: int, seed: int
) -> None:
    """Measure draft contexts and windows on MODEL's held-out text, on this CPU."""
    try:
        asked = [[int(item) for item in items.split(",") if item] for items in (contexts, windows)]
        decoder = Decoder.load(model, device="cpu", num_speculative_tokens=drafts)
        session = decoder.session
        assert isinstance(session, CpuSession), "device cpu gives one of the two"
        text = HeldOutText.read(model)
        ids = text.ids(Tokenizer.from_file(str(model / "tokenizer.json")))
        click.echo(
            f"{len(ids):,} held-out tokens, {text.unchanged} of {text.listed} files byte for byte as listed; "
            f"{count} prompts a depth, {max_tokens} new tokens, k = {drafts}"
        )
        click.echo(HEADER)
        for depth in map(int, depths.split(",")):
            excerpts = list(prompts(ids, count, depth, seed))
            found = measure_depth(session, excerpts, settings_at(depth, *asked), drafts, max_tokens)
            for setting, runs in found.items():
                check_same_output(found[WHOLE_PROMPT], runs, depth)
                click.echo(row(depth, setting, runs, found[WHOLE_PROMPT]))
    except DecoderError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
