"""Prefill and step times of a whole model without a checkpoint: random FP8 weights made in the card's memory.

`python -m kernarc.decoder.bench.model [--shape 27b] [--depths 8192,65536] [--drafts 0,1,2,3,4,6,8]
[--draft-rows 40960] [--prefill bf16,fp8] [--gdn early,late,split] [--profile] [--sweep]`. Ids mean nothing here
(device_check has those); bytes, products and caches are the model's own. Prints one line a measurement.
"""

import time
from dataclasses import replace
from statistics import median

import click
import torch
import triton
from torch.profiler import ProfilerActivity, profile

from ..checkpoint.config import ModelConfig
from ..checkpoint.shapes import read_shape
from ..cuda.kernels.products import CudaProducts
from ..cuda.session import CudaSession, Tuning
from .command_line import COUNTS, DRAFT_COUNTS, NamesOf, on_card, require_card
from .gdn_prefill import FORMS
from .gdn_prefill import bench as bench_delta_rule
from .random_cuda_weights import RandomWeights

WARM_STEPS = 4


@click.command(help=__doc__)
@click.option("--shape", default="27b")
@click.option("--layers", type=int, help="only the first so many layers")
@click.option("--depths", type=COUNTS, default="8192,65536")
@click.option("--drafts", type=DRAFT_COUNTS, default="3", help="draft counts to time, empty for none")
@click.option("--draft-rows", type=int, help="rows of the draft head; all unless given")
@click.option("--steps", default=24)
@click.option("--prefill", "kinds", type=NamesOf(("bf16", "fp8")), default="bf16", help="bf16, fp8, or both: bf16,fp8")
@click.option(
    "--gdn",
    "gdns",
    type=NamesOf(("early", "late", "split")),
    default="early",
    help="a GDN layer of a step: early or late gates in one kernel, split in three; or several",
)
@click.option("--sweep", is_flag=True, help="time one layer's delta rule in its forms")
@click.option("--profile", "shows_kernels", is_flag=True, help="print the kernels of a prefill")
@on_card
def main(
    shape: str,
    layers: int | None,
    depths: list[int],
    drafts: list[int],
    draft_rows: int | None,
    steps: int,
    kinds: list[str],
    gdns: list[str],
    sweep: bool,
    shows_kernels: bool,
) -> None:
    """Print load, prefill and step times."""
    config = ModelConfig.from_dict(read_shape(shape))
    if layers:
        count = min(layers, config.num_hidden_layers)
        config = replace(config, num_hidden_layers=count, layer_types=config.layer_types[:count])
    card = require_card()
    print(
        f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__}, {shape}, "
        f"{config.num_hidden_layers} layers, draft head {draft_rows or config.vocab_size} rows",
        flush=True,
    )
    if sweep:
        bench_delta_rule(card, [8192, 16384], list(FORMS))
    weights = RandomWeights(config, card).model(draft_rows=draft_rows)
    window = max(depths) + 9 * (steps + WARM_STEPS + 2) * (len(drafts) + 2)
    products = CudaProducts(weights.linears(), card)
    for gdn, kind in [(gdns[0], kind) for kind in kinds] + [(gdn, kinds[0]) for gdn in gdns[1:]]:
        start = time.perf_counter()
        session = CudaSession(
            config, weights, products, max_context=window, device=card,
            prefill_fp8=kind == "fp8", tuning=Tuning(fused_gdn=gdn != "split", gates_early=gdn == "early"),
        )  # fmt: skip
        session.warm_up(drafts[0] if drafts else 0)
        gib = torch.cuda.memory_allocated() / 2**30
        print(f"prefill in {kind}, GDN {gdn}: warm-up {time.perf_counter() - start:.1f} s, {gib:.1f} GiB", flush=True)
        for depth in depths:
            _measure(session, depth, drafts if kind == kinds[0] else [], steps)  # a step knows no prefill
            if shows_kernels and gdn == gdns[0]:
                profile_prefill(session, depth)
        del session


def _prompt(session: CudaSession, depth: int) -> list[int]:
    return [(7919 * place + 13) % session.config.vocab_size for place in range(depth)]


def _measure(session: CudaSession, depth: int, drafts: list[int], steps: int) -> None:
    prompt = _prompt(session, depth)
    seconds = []
    for _ in range(3 if depth < 32768 else 2):
        start = time.perf_counter()
        session.prefill(prompt)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"depth {depth:6} prefill {seconds[-1]:6.3f} s (first {seconds[0]:.3f}), peak {peak:.1f} GiB", flush=True)
    for count in drafts:
        times = []
        for _ in range(steps + WARM_STEPS):
            start = time.perf_counter()
            session.step(count)
            times.append((time.perf_counter() - start) * 1e3)
        settled = times[WARM_STEPS:]
        mean = sum(settled) / len(settled)
        print(f"depth {depth:6} drafts {count} step {mean:7.3f} ms (median {median(settled):.3f})", flush=True)


def profile_prefill(session: CudaSession, depth: int) -> None:
    """Print the kernels of one prefill, the largest share first."""
    prompt = _prompt(session, depth)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        session.prefill(prompt)
        torch.cuda.synchronize()
    rows = [(event.self_device_time_total / 1e3, event.count, event.key) for event in trace.key_averages()]
    print(f"prefill of {depth}: {sum(row[0] for row in rows):.1f} ms busy")
    for ms, count, name in sorted(rows, reverse=True)[:22]:
        print(f"{ms:9.2f} ms {count:6} calls {1e3 * ms / max(count, 1):9.1f} us each  {name[:90]}")


if __name__ == "__main__":
    main()
