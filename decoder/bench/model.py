"""Prefill and step times of a whole model without a checkpoint: random FP8 weights made in the card's memory.

`python -m kernarc.decoder.bench.model [--shape 27b] [--depths 8192,65536] [--drafts 0,1,2,3,4,6,8]
[--draft-rows 40960] [--prefill bf16,fp8] [--gdn early,late,split] [--profile] [--sweep]`. Ids mean nothing here
(device_check has those); bytes, products and caches are the model's own. Prints one line a measurement.
"""

import argparse
import time
from dataclasses import replace
from statistics import median

import torch
import triton
from torch.profiler import ProfilerActivity, profile

from ..checkpoint.config import ModelConfig
from ..checkpoint.shapes import read_shape
from ..cuda.kernels.products import CudaProducts
from ..cuda.session import CudaSession, Tuning
from .command_line import counts, draft_counts, exit_with, names_of, require_card
from .gdn_prefill import FORMS
from .gdn_prefill import bench as bench_delta_rule
from .random_cuda_weights import RandomWeights

WARM_STEPS = 4


def main() -> None:
    """Print load, prefill and step times."""
    options = _options()
    config = ModelConfig.from_dict(read_shape(options.shape))
    if options.layers:
        count = min(options.layers, config.num_hidden_layers)
        config = replace(config, num_hidden_layers=count, layer_types=config.layer_types[:count])
    depths, drafts, card = options.depths, options.drafts, require_card()
    print(
        f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__}, {options.shape}, "
        f"{config.num_hidden_layers} layers, draft head {options.draft_rows or config.vocab_size} rows",
        flush=True,
    )
    if options.sweep:
        bench_delta_rule(card, [8192, 16384], list(FORMS))
    weights = RandomWeights(config, card).model(draft_rows=options.draft_rows)
    window = max(depths) + 9 * (options.steps + WARM_STEPS + 2) * (len(drafts) + 2)
    products = CudaProducts(weights.linears(), card)
    gdns, kinds = options.gdn, options.prefill
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
            _measure(session, depth, drafts if kind == kinds[0] else [], options.steps)  # a step knows no prefill
            if options.profile and gdn == gdns[0]:
                profile_prefill(session, depth)
        del session


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="27b")
    parser.add_argument("--layers", type=int, help="only the first so many layers")
    parser.add_argument("--depths", type=counts, default="8192,65536")
    parser.add_argument("--drafts", type=draft_counts, default="3", help="draft counts to time, empty for none")
    parser.add_argument("--draft-rows", type=int, help="rows of the draft head; all unless given")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument(
        "--prefill", type=names_of(("bf16", "fp8")), default="bf16", help="bf16, fp8, or both: bf16,fp8"
    )
    parser.add_argument(
        "--gdn",
        type=names_of(("early", "late", "split")),
        default="early",
        help="a GDN layer of a step: early or late gates in one kernel, split in three; or several",
    )
    parser.add_argument("--sweep", action="store_true", help="time one layer's delta rule in its forms")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a prefill")
    return parser.parse_args()


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
    exit_with(main)
