"""One layer's delta rule over a prompt, in each of its forms: times by kernel and errors, at the 27B shapes.

`python -m kernarc.decoder.bench.gdn_prefill [--rows 8192,16384] [--forms cuda,triton]`, on a card.
"""

from collections.abc import Callable

import click
import torch
import triton
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ..cuda.kernels.gdn_prefill import CUDA, TRITON, Form, gdn_prefill
from ..cuda.kernels.gdn_verify import delta_rule_naive
from .command_line import NamesOf, on_card, require_card, rows_option

KEY_HEADS, HEADS, DIM = 16, 48, 128
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
CHECKED_ROWS = 1000  # token by token; more take long
FORMS = {form.name: form for form in (CUDA, TRITON)}


def random_inputs(rows: int, card: torch.device) -> tuple[Tensor, ...]:
    """(q, k, v, g, beta, state) as a delta rule takes them."""

    def unit(scale: float) -> Tensor:
        x = torch.randn(rows, KEY_HEADS, DIM, device=card)
        return (torch.nn.functional.normalize(x, dim=-1) * scale).half()

    v = torch.randn(rows, HEADS, DIM, device=card).half()
    g, beta = -torch.rand(rows, HEADS, device=card) * 0.1, torch.rand(rows, HEADS, device=card)
    return unit(DIM**-0.5), unit(1.0), v, g, beta, torch.randn(HEADS, DIM, DIM, device=card) * 0.1


def errors(form: Form, card: torch.device) -> tuple[float, float]:
    """‖·‖ of what is off over ‖·‖, of outputs and final state, against fp32 token by token."""
    *tensors, state = random_inputs(CHECKED_ROWS, card)
    q, k, v, g, beta = (x.float() for x in tensors)
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (q, k))
    expected, final = delta_rule_naive(q, k, v, g.exp(), beta, state)
    actual = form.delta_rule(*tensors, state)  # type: ignore[call-arg]
    pairs = ((actual.float(), expected), (state, final))
    out, last = (float((one - other).norm() / other.norm()) for one, other in pairs)
    return out, last


def kernel_times_ms(run: Callable[[], object]) -> dict[str, float]:
    """Name → device time of one call."""
    calls = 5
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    found = {event.key: event.self_device_time_total / 1e3 / calls for event in trace.key_averages()}
    return {name.split("(")[0]: ms for name, ms in found.items() if ms > 0}


def print_times(name: str, rows: int, card: torch.device) -> None:
    """One line: convolution and delta rule of a layer together, then each kernel."""
    x = torch.randn(rows, 16384, device=card).bfloat16()
    raw = torch.zeros(32, CHANNELS, dtype=torch.float16, device=card)
    conv = torch.randn(CHANNELS, 4, device=card)
    *_, g, beta, state = random_inputs(rows, card)

    def run() -> Tensor:
        return gdn_prefill(x, raw, conv, g, beta, state, 0, FORMS[name])

    ms = triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")
    parts = ", ".join(f"{kernel} {part:.3f}" for kernel, part in kernel_times_ms(run).items())
    print(f"delta rule, {name}: {rows} rows of a layer {ms:.3f} ms ({parts})", flush=True)


def bench(card: torch.device, row_counts: list[int], names: list[str]) -> None:
    """Print errors and times of each form."""
    for name in names:
        out, last = errors(FORMS[name], card)
        print(f"delta rule, {name}: error of outputs {out:.1e}, of the state {last:.1e}", flush=True)
    for rows in row_counts:
        for name in names:
            print_times(name, rows, card)


@click.command(help=__doc__)
@rows_option("8192,16384")
@click.option("--forms", type=NamesOf(list(FORMS)), default="cuda,triton")
@on_card
def main(row_counts: list[int], forms: list[str]) -> None:
    """Print errors and times."""
    bench(require_card(), row_counts, forms)


if __name__ == "__main__":
    main()
