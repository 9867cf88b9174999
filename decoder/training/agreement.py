"""`python -m kernarc.decoder.training.agreement MODEL NAME=URL …`: do engines continue held-out prompts alike?

Each endpoint (OpenAI-compatible, serving MODEL) continues the same prompts greedily. transformers then reads prompt
and output once, in fp32: at every output position the gap is its top logit minus the logit of the emitted token.
Zero is a match; up to tau a near-tie; above, a divergence. tau is the largest gap of transformers' own bf16 choice
on these texts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import combinations
from json import dumps, loads
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import click
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..errors import DecoderError
from .card import add_scores
from .heldout import HeldOutText, prompts


def ask(url: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    """The JSON answer of a GET (no body) or POST; raises OSError where the endpoint does not answer."""
    data = None if body is None else dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=timeout_s) as answer:
        found: dict[str, Any] = loads(answer.read())
    return found


def continue_prompts(url: str, excerpts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The endpoint's greedy continuation of each prompt, as token ids."""
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    model = ask(base + "/models", None, 60)["data"][0]["id"]
    outputs = []
    for excerpt in excerpts:
        body = {"model": model, "prompt": excerpt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        choice = ask(base + "/completions", {**body, "return_token_ids": True}, 600)["choices"][0]
        if len(choice.get("token_ids") or ()) != max_tokens:
            raise DecoderError(
                f"{url} answered {len(choice.get('token_ids') or ())} token ids instead of {max_tokens}",
                "the endpoint must know return_token_ids and ignore_eos",
            )
        outputs.append(choice["token_ids"])
    return outputs


@dataclass(frozen=True)
class Gaps:
    """Reference gaps of emitted tokens, and of the reference's own bf16 choice at the same places."""

    emitted: Tensor
    bf16_choice: Tensor


def reference_gaps(folder: Path, excerpts: list[list[int]], outputs: list[list[int]]) -> Gaps:
    """Teacher-forced transformers, fp32 beside bf16. Prompts have one length, outputs too."""
    ids = torch.tensor([p + o for p, o in zip(excerpts, outputs, strict=True)])
    begin = len(excerpts[0]) - 1
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        with torch.no_grad():
            parts = [
                model(part, logits_to_keep=ids.shape[1] - begin).logits[:, :-1].float() for part in torch.split(ids, 8)
            ]
        logits[dtype] = torch.cat(parts)
    wide = logits[torch.float32]
    top = wide.amax(-1)

    def gap(tokens: Tensor) -> Tensor:
        return top - wide.gather(-1, tokens[..., None])[..., 0]

    return Gaps(gap(ids[:, begin + 1 :]), gap(logits[torch.bfloat16].argmax(-1)))


def describe(name: str, gaps: Gaps, tau: float) -> dict[str, float]:
    """Rates of one engine's tokens."""
    g = gaps.emitted
    return {
        "positions": g.numel(),
        "matches": round(float((g == 0).float().mean()), 5),
        "near_ties": round(float(((g > 0) & (g <= tau)).float().mean()), 5),
        "divergences": round(float((g > tau).float().mean()), 5),
        "worst_gap": round(float(g.max()), 4),
    }


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("endpoints", nargs=-1, required=True, metavar="NAME=URL…")
@click.option(
    "--library",
    type=click.Path(path_type=Path),
    help="a standard library's folder (default: the running interpreter's)",
)
@click.option("--prompts", "num_prompts", default=64)
@click.option("--length", default=128)
@click.option("--max-tokens", default=64)
@click.option("--seed", default=1)
@click.option("--write-card", is_flag=True, help="put the rates into training.json and README.md")
def main(
    model: Path,
    endpoints: tuple[str, ...],
    library: Path | None,
    num_prompts: int,
    length: int,
    max_tokens: int,
    seed: int,
    write_card: bool,
) -> None:
    """Command line."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = HeldOutText.read(model, library).ids(tokenizer)
    excerpts = list(prompts(ids, num_prompts, length, seed))
    outputs = {}
    for endpoint in endpoints:
        name, _, url = endpoint.partition("=")
        outputs[name] = continue_prompts(url, excerpts, max_tokens)
    gaps = {name: reference_gaps(model, excerpts, found) for name, found in outputs.items()}
    tau = max(float(g.bf16_choice.max()) for g in gaps.values())
    scores: dict[str, Any] = {"near-tie bound tau (bf16 against fp32, logits)": round(tau, 4)}
    for name, found in gaps.items():
        scores[f"{name} against transformers, {num_prompts} prompts"] = describe(name, found, tau)
    for first, second in combinations(outputs, 2):
        same = sum(a == b for a, b in zip(outputs[first], outputs[second], strict=True))
        scores[f"identical texts, {first} and {second}"] = f"{same} of {num_prompts}"
    for name, value in scores.items():
        sys.stdout.write(f"{name}: {value}\n")
    if write_card:
        add_scores(model, scores)


if __name__ == "__main__":
    main()
