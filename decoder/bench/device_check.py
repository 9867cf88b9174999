"""The 27B decoder on a card: load time, ids against the known cycle, step and prefill times, where a step's time goes.

`python -m kernarc.decoder.bench.device_check MODEL_DIR [--depths 128,8192] [--steps 64] [--drafts 3]
[--draft-vocab FILE] [--profile] [--step-profile RUN_DIR/step_profile.json]`, MODEL_DIR a structured checkpoint
(`model synth`). Prints one line a measurement; exit code 1 where an id was wrong.
"""

import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import click
import torch

from ..checkpoint.config import ModelConfig
from ..checkpoint.draft_vocabulary import DraftVocabulary
from ..checkpoint.synthetic import TokenCycle
from ..checkpoint.weights import Checkpoint
from ..cuda.session import CudaSession
from .command_line import COUNTS, on_card, require_card
from .model import profile_prefill
from .step_profile import StepProfiler, write_profile


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--depths", type=COUNTS, default="128,8192,32768,65536")
@click.option("--steps", default=64)
@click.option("--drafts", default=3)
@click.option("--draft-vocab", type=click.Path(path_type=Path), help="draft only the tokens of this file")
@click.option("--prefill-fp8", is_flag=True)
@click.option("--profile", is_flag=True, help="print the time of a step and of a prefill by kernel")
@click.option(
    "--step-profile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="write the parts of a step at every depth",
)
@click.option("--build", default="kernarc", help="the build's name in FILE")
@on_card
def main(
    model: Path,
    depths: list[int],
    steps: int,
    drafts: int,
    draft_vocab: Path | None,
    prefill_fp8: bool,
    profile: bool,
    step_profile: Path | None,
    build: str,
) -> None:
    """Run the check; exit code 1 where an id was wrong."""
    config = ModelConfig.from_directory(model)
    require_card()
    window = max(depths) + (steps + 24) * (drafts + 1)
    print(_card(), flush=True)
    start = time.perf_counter()
    vocabulary = DraftVocabulary.read(draft_vocab, config.vocab_size) if draft_vocab else None
    session = CudaSession.load(
        Checkpoint(model, config),
        config,
        max_context=window,
        num_speculative_tokens=drafts,
        draft_vocabulary=vocabulary,
        prefill_fp8=prefill_fp8,
    )
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated() / 2**30
    print(f"load {time.perf_counter() - start:.1f} s, {used:.1f} GiB allocated", flush=True)
    cycle = TokenCycle.of_checkpoint(model, config.vocab_size)
    wrong = 0
    for depth in depths:
        wrong += _measure(session, cycle, depth, steps, drafts)
    profiler = StepProfiler(session, drafts, window) if profile or step_profile else None
    if profiler and profile:
        _print_kernels(profiler.trace(_prompt(session, depths[0])), profiler.steps)
    if profiler and step_profile:
        _write_parts(profiler, step_profile, build, {depth: _prompt(session, depth) for depth in depths})
    if profile:
        profile_prefill(session, min(depths[-1], 8192))
    print("ids " + ("follow the cycle" if not wrong else f"WRONG at {wrong} depths"), flush=True)
    sys.exit(1 if wrong else 0)


def _card() -> str:
    import triton

    return f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__}"


def _prompt(session: CudaSession, depth: int) -> list[int]:
    return [random.Random(depth).randrange(session.config.vocab_size) for _ in range(depth)]


def _measure(session: CudaSession, cycle: TokenCycle, depth: int, steps: int, drafts: int) -> bool:
    """Print one depth; whether an id was wrong."""
    prompt = _prompt(session, depth)
    prefill_s = []
    for _ in range(2):  # the first of its length may plan and allocate
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


def _write_parts(profiler: StepProfiler, path: Path, build: str, prompts: dict[int, list[int]]) -> None:
    """Write and print the parts of a step at every depth."""
    by_depth = {depth: profiler.parts(prompt) for depth, prompt in prompts.items()}
    write_profile(path, build, by_depth)
    for depth, parts in by_depth.items():
        line = ", ".join(f"{name} {ms:.3f}" for name, ms in parts.items())
        print(f"depth {depth:6} one after the other {sum(parts.values()):.3f} ms: {line}", flush=True)


def _print_kernels(kernels: list[tuple[str, float]], steps: int) -> None:
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, micros in kernels:
        by_name[name].append(micros)
    total = sum(micros for _, micros in kernels)
    print(f"kernels of a step: {len(kernels) / steps:.0f}, {total / steps / 1e3:.3f} ms busy")
    for name, each in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:16]:
        print(
            f"{sum(each) / steps:9.1f} us {len(each) / steps:6.1f} calls "
            f"{sum(each) / len(each):7.2f} us each  {name[:70]}"
        )


if __name__ == "__main__":
    main()
