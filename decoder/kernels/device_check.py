"""The 27B decoder on a card: load time, ids against the known cycle, step and prefill times, where a step's time goes.

`python -m kernarc.decoder.kernels.device_check MODEL_DIR [--depths 128,8192] [--steps 64] [--drafts 3]`, MODEL_DIR a
structured checkpoint (`model synth`) made with the same --seed and --acceptance. Prints one line a measurement.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from ..config import ModelConfig
from ..cuda_session import CudaSession
from ..synthetic import TokenCycle
from ..weights import Checkpoint
from .products import CudaProducts


def main(arguments: list[str]) -> int:
    """Run the check; the exit code."""
    options = _options(arguments)
    config = ModelConfig.from_directory(options.model)
    depths = [int(depth) for depth in options.depths.split(",")]
    window = max(depths) + (options.steps + 24) * (options.drafts + 1)
    print(_card(), flush=True)
    start = time.perf_counter()
    session = CudaSession.load(
        Checkpoint(options.model, config), config, max_context=window, num_speculative_tokens=options.drafts
    )
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated() / 2**30
    print(f"load {time.perf_counter() - start:.1f} s, {used:.1f} GiB allocated", flush=True)
    cycle = TokenCycle.make(config.vocab_size, options.acceptance, options.seed)
    wrong = 0
    for depth in depths:
        wrong += _measure(session, cycle, depth, options.steps, options.drafts)
    if options.profile:
        _profile(_serial(session, window), [1] * depths[0], options.drafts)
    print("ids " + ("follow the cycle" if not wrong else f"WRONG at {wrong} depths"), flush=True)
    return 1 if wrong else 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--depths", default="128,8192,32768,65536")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=0.87)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="print the time of a step by kernel")
    return parser.parse_args(arguments)


def _card() -> str:
    import triton

    return f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__}"


def _measure(session: CudaSession, cycle: TokenCycle, depth: int, steps: int, drafts: int) -> bool:
    """Print one depth; whether an id was wrong."""
    prompt = [random.Random(depth).randrange(session.config.vocab_size) for _ in range(depth)]
    prefill_s = []
    for _ in range(2 if depth < 8192 else 1):  # the first of all compiles
        start = time.perf_counter()
        ids = [session.prefill(prompt)]
        prefill_s.append(time.perf_counter() - start)
    step_ms = []
    for _ in range(steps):
        start = time.perf_counter()
        tokens, _ = session.step(drafts)
        step_ms.append((time.perf_counter() - start) * 1e3)
        ids += tokens
    wrong = ids != cycle.continuation(prompt[-1], len(ids))
    settled = step_ms[4:]
    per_step = (len(ids) - 1) / steps
    mean = sum(settled) / len(settled)
    print(
        f"depth {depth:6} prefill {prefill_s[-1]:7.3f} s (first {prefill_s[0]:.2f})  step {mean:6.3f} ms "
        f"(median {median(settled):.3f})  {per_step:.2f} tokens/step  {mean / per_step:.3f} ms/token  "
        f"ids {'WRONG' if wrong else 'right'}",
        flush=True,
    )
    return wrong


def _serial(session: CudaSession, window: int) -> CudaSession:
    """The same weights with kernels one after the other: overlapped ones would count each other's time."""
    weights = session.weights
    card = torch.device("cuda", torch.cuda.current_device())
    products = CudaProducts(weights.linears(), card, overlap=False)
    return CudaSession(session.config, weights, products, max_context=window, device=card, overlap=False, pdl=False)


def _profile(session: CudaSession, prompt: list[int], drafts: int, steps: int = 8) -> None:
    """Print the kernels of a step, largest share first."""
    session.prefill(prompt)
    session.step(drafts)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            session.step(drafts)
        torch.cuda.synchronize()
    _print_kernels(trace, "a step", steps)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        session.prefill(prompt * 64)
        torch.cuda.synchronize()
    _print_kernels(trace, f"a prefill of {64 * len(prompt)}", 1)


def _print_kernels(trace: profile, what: str, steps: int) -> None:
    rows = [(event.self_device_time_total / steps, event.count / steps, event.key) for event in trace.key_averages()]
    total = sum(row[0] for row in rows)
    print(f"kernels of {what}: {sum(row[1] for row in rows):.0f}, {total / 1e3:.3f} ms busy")
    for micros, count, name in sorted(rows, reverse=True)[:16]:
        print(f"{micros:9.1f} us {count:6.1f} calls {micros / max(count, 1e-9):7.2f} us each  {name[:70]}")


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(sys.argv[1:]))
