"""Every kernel of a step at the 27B shapes: µs, bytes, GB/s and the share of the card's copy bandwidth.

`python -m kernarc.decoder.bench.kernels [--rows 1,2,3,4,5,8,9] [--lengths 128,8192,65536]` on a card. Each kernel runs
in one CUDA graph over layers of its own (weights, states and caches rotate past L2), overlapped as in a step. How a
whole step divides: device_check --profile.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import click
import torch

from ..cuda.kernels.gdn import gdn_step, gdn_step_fits
from ..cuda.kernels.gdn_prepare import GdnCache, GdnWeights, gdn_prepare
from ..cuda.kernels.gdn_verify import gate_output, gdn_recur
from ..cuda.kernels.launch import Launch
from ..cuda.kernels.linear import Norm, Residual
from ..cuda.kernels.norm import rms_norm
from ..cuda.kernels.packing import PackedLinear, pack_bf16, pack_fp8
from ..cuda.kernels.products import CudaProducts
from ..cuda.kernels.rope_qk import rope_qk, rope_tables
from ..cuda.kernels.screened_head import HeadScratch, ScreenedHead, screened_argmax
from ..cuda.kernels.verify_attention import segments_for, verify_attention
from .command_line import COUNTS, on_card, require_card, rows_option

WIDTH, INNER, HEADS, CHANNELS, VOCABULARY = 5120, 17408, 48, 10240, 248_320
DRAFT_ROWS = 40_960
GDN_LAYERS, ATTENTION_LAYERS = 48, 4
ROTATED_BYTES = 1 << 30  # of weights a product cycles through; L2 holds 60 MB
WARM_UPS = 10  # of a fifth of a second in all: an idle card's clocks take some time to rise
CARD = torch.device("cuda", 0)
HALF, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel to time: call(layer) for layer 0 … layers − 1, and the bytes a call must move."""

    name: str
    num_bytes: int
    layers: int
    call: Callable[[int], object]


def time_us(case: Case, repeats: int = 10) -> float:
    """µs a call inside a graph of one call a layer."""
    case.call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(case.layers):
            case.call(layer)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / repeats / case.layers


def copy_gb_per_s() -> float:
    """Bytes read and written a second by a kernel that does little else over 1 GiB.

    A copy inside a graph is left to the copy engine, which moves 2.8 TB/s on an H200 where kernels move 4.3.
    """
    source = torch.zeros(1 << 27, dtype=torch.int64, device=CARD)
    target = torch.empty_like(source)

    def copy(layer: int) -> None:
        torch.bitwise_not(source, out=target)

    return max((2 << 30) / time_us(Case("copy", 2 << 30, 4, copy)) / 1e3 for _ in range(WARM_UPS))


def _random(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(shape, device=CARD).to(dtype)


def _fp8(*sizes: int, k: int, interleave: bool = False) -> list[PackedLinear]:
    parts = [
        (_random(n, k, dtype=torch.float8_e4m3fn), torch.ones(-(-n // 128), -(-k // 128), device=CARD)) for n in sizes
    ]
    return _copies(pack_fp8(parts, interleave=interleave))


def _copies(packed: PackedLinear) -> list[PackedLinear]:
    count = max(1, ROTATED_BYTES // packed.num_bytes)
    return [packed, *(replace(packed, weights=packed.weights.clone()) for _ in range(count - 1))]


def product_cases(rows: int) -> Iterator[Case]:
    """Every matrix product of a layer, and the vocabulary head in bf16 and FP8."""
    stream, sumsq = _random(rows, WIDTH, dtype=FP32), torch.ones(rows, WIDTH // 32, device=CARD)
    x, norm, gain = _random(rows, WIDTH), Norm(sumsq, 1e-6), _random(WIDTH, dtype=BF16)
    residual = Residual(stream, sumsq, x, gain)
    ids = torch.zeros(rows, dtype=torch.int64, device=CARD)
    overlap = torch.cuda.get_device_capability() >= (9, 0)

    def case(name: str, weights: list[PackedLinear], run: Callable[[CudaProducts, PackedLinear], None]) -> Case:
        products = CudaProducts(weights[:1], CARD)
        return Case(name, weights[0].num_bytes, len(weights), lambda layer: run(products, weights[layer]))

    wide, mixed, inner = _random(rows, 16384), _random(rows, 6144), _random(rows, INNER)
    yield case("qkv + z", _fp8(CHANNELS, 6144, k=WIDTH), lambda p, w: p.store(x, w, wide, norm))
    yield case("output projection", _fp8(WIDTH, k=6144), lambda p, w: p.add(mixed, w, residual))
    yield case(
        "gate + up + SwiGLU", _fp8(INNER, INNER, k=WIDTH, interleave=True), lambda p, w: p.swiglu(x, w, inner, norm)
    )
    yield case("down", _fp8(WIDTH, k=INNER), lambda p, w: p.add(inner, w, residual))
    yield case("head, FP8", _fp8(VOCABULARY, k=WIDTH), lambda p, w: p.argmax(x, w, ids))
    yield case("draft head, 40,960 rows", _fp8(DRAFT_ROWS, k=WIDTH), lambda p, w: p.argmax(x, w, ids))
    dense = _random(VOCABULARY, WIDTH, dtype=BF16)
    yield case("head, bf16", _copies(pack_bf16(dense)), lambda p, w: p.argmax(x, w, ids))
    head, scratch = ScreenedHead.build(dense, name="bench"), HeadScratch(VOCABULARY, CARD)
    products = CudaProducts([head.screen], CARD)
    yield Case(
        "head, screened", head.screen.num_bytes, 1,
        lambda i: screened_argmax(x, head, scratch, products, ids, Launch(overlap)),
    )  # fmt: skip


def gdn_cases(rows: int, launch: Launch) -> Iterator[Case]:
    """The kernels of a GDN layer after a step that kept as many rows as this one has."""
    caches = [GdnCache.allocate(HEADS, 128, 128, CHANNELS, HALF, CARD) for _ in range(GDN_LAYERS)]
    weights = [
        GdnWeights(
            _random(HEADS, WIDTH, dtype=BF16), _random(HEADS, WIDTH, dtype=BF16), _random(HEADS, dtype=FP32),
            _random(HEADS, dtype=FP32), _random(CHANNELS, 4, dtype=FP32), _random(128, dtype=BF16),
        )
        for _ in range(GDN_LAYERS)
    ]  # fmt: skip
    projected, x, out = _random(rows, 16384), _random(rows, WIDTH), _random(rows, 6144)
    sumsq = torch.full((rows, WIDTH // 32), 32.0, device=CARD)
    q, o = _random(16, 16, 128, dtype=FP32), _random(rows, HEADS, 128, dtype=FP32)
    positions = torch.tensor([104 + rows, 104, 104, 0], dtype=torch.int32, device=CARD)
    gate_bytes, state_bytes = 2 * HEADS * WIDTH * 2 + CHANNELS * 16, 2 * HEADS * 128 * 128 * 4
    if gdn_step_fits(128, 128, CARD):
        yield Case(
            "gdn, one kernel", gate_bytes + state_bytes, GDN_LAYERS,
            lambda i: gdn_step(projected, x, sumsq, weights[i], caches[i], 1e-6, positions, out, overlap=launch.pdl),
        )  # fmt: skip
    yield Case(
        "gdn_prepare", gate_bytes, GDN_LAYERS,
        lambda i: gdn_prepare(projected, x, sumsq, weights[i], caches[i], q, 1e-6, positions, launch=launch),
    )  # fmt: skip
    yield Case(
        "gdn_recur", state_bytes, GDN_LAYERS, lambda i: gdn_recur(q, caches[i], positions, o, launch=launch)
    )  # fmt: skip
    yield Case(
        "gate_output", 3 * out.numel() * 2, GDN_LAYERS,
        lambda i: gate_output(o, projected[:, CHANNELS:], weights[i].norm, 1e-6, out, launch=launch),
    )  # fmt: skip


def attention_cases(rows: int, length: int, launch: Launch) -> Iterator[Case]:
    """The kernels of an attention layer at one length, with one and with two programs an SM."""
    capacity = length + 32
    keys, values = ([_random(4, capacity, 256) for _ in range(ATTENTION_LAYERS)] for _ in range(2))
    qkv, q, out = _random(rows, 14336), _random(rows, 24, 256), _random(rows, 6144)
    norm, table = _random(256, dtype=BF16), rope_tables(64, 1e7, capacity, CARD)
    positions = torch.tensor([length, 0, 0, 0], dtype=torch.int32, device=CARD)
    segments = segments_for(torch.cuda.get_device_properties(CARD).multi_processor_count, 4)
    scratch = [torch.empty(2 * segments * rows * 24 * size, device=CARD) for size in (256, 1, 1)]
    yield Case(
        "rope_qk", qkv.numel() * 2, ATTENTION_LAYERS,
        lambda i: rope_qk(qkv, norm, norm, 1e-6, table, positions, q, keys[i], values[i], launch=launch),
    )  # fmt: skip
    for waves, num_stages in ((1, 3), (2, 2)):

        def attend(layer: int, waves: int = waves, num_stages: int = num_stages) -> None:
            verify_attention(
                q, keys[layer], values[layer], positions, qkv, scratch[0], scratch[1], scratch[2], out,
                segments=waves * segments, num_stages=num_stages, launch=launch,
            )  # fmt: skip

        yield Case(f"attention at {length}, {waves} a SM", length * 4096, ATTENTION_LAYERS, attend)


@click.command(help=__doc__)
@rows_option("1,2,3,4,5,8,9")
@click.option("--lengths", type=COUNTS, default="128,8192,65536")
@on_card
def main(row_counts: list[int], lengths: list[int]) -> None:
    """Print one line a kernel and row count."""
    require_card()
    ceiling = copy_gb_per_s()
    print(f"{torch.cuda.get_device_name()}, copy {ceiling:.0f} GB/s")
    launch = Launch(torch.cuda.get_device_capability() >= (9, 0))
    for rows in row_counts:
        stream, out = _random(rows, WIDTH, dtype=FP32), _random(rows, WIDTH)
        gain = _random(WIDTH)
        norm = Case(
            "rms_norm", stream.numel() * 6, GDN_LAYERS,
            lambda i, s=stream, o=out, g=gain: rms_norm(s, g, 1e-6, o, launch=launch),  # type: ignore[misc]
        )  # fmt: skip
        cases = [norm, *gdn_cases(rows, launch)]
        for length in lengths:
            cases += attention_cases(rows, length, launch)
        for case in cases:
            print_case(case, rows, ceiling)
        for case in product_cases(rows):  # one at a time: together their copies would fill a smaller card
            print_case(case, rows, ceiling)


def print_case(case: Case, rows: int, ceiling: float, operations: int = 0) -> None:
    """Time a case and print its line: GB/s beside the copy's, or TFLOP/s where it has operations to be bound by."""
    us = time_us(case)
    speed = case.num_bytes / us / 1e3
    rate = f"{operations / us / 1e6:6.0f} TFLOP/s" if operations else f"{speed:6.0f} GB/s {speed / ceiling:5.0%}"
    print(f"{case.name:28} rows {rows:2} {us:8.2f} us {case.num_bytes / 1e6:9.2f} MB {rate}", flush=True)


if __name__ == "__main__":
    main()
