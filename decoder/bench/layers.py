"""What the mixers cost inside a step: layers of products and mixers in one CUDA graph, less the products alone.

`python -m kernarc.decoder.bench.layers [--rows 4] [--layers 16] [--lengths 128,8192] [--parts gdn,attention]`
on a card; needs no checkpoint. Every layer has weights, state and cache of its own, so all rotate past L2, and every
kernel overlaps its neighbours as in a step. Lines: µs a layer of the chain, of the mixer in it, of its kernels alone.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import click
import torch

from ..cuda.kernels.gdn import CTA_COLUMNS, SOURCE, arguments_of, definitions, gdn_step, gdn_step_naive
from ..cuda.kernels.gdn_prepare import GdnCache, GdnWeights, gdn_prepare
from ..cuda.kernels.gdn_verify import gate_output, gdn_recur
from ..cuda.kernels.launch import Launch
from ..cuda.kernels.linear import X_SCALE, Norm, Residual
from ..cuda.kernels.nvrtc import CudaKernel, compile_cubin, kernel
from ..cuda.kernels.packing import PackedLinear, pack_fp8
from ..cuda.kernels.products import CudaProducts
from ..cuda.kernels.rope_qk import rope_qk, rope_tables
from ..cuda.kernels.verify_attention import segments_for, verify_attention
from .command_line import COUNTS, NamesOf, on_card, require_card, rows_option

WIDTH, INNER, HEADS, CHANNELS = 5120, 17408, 48, 10240
EPS = 1e-6
CARD = torch.device("cuda", 0)
HALF, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16
Mixer = Callable[[int], None]
GATES_FIRST = "gdn: fused, gates before the wait"


@dataclass(frozen=True, slots=True)
class Bench:
    """Activations and weights of a chain of layers."""

    rows: int
    layers: int
    stream: torch.Tensor
    sumsq: torch.Tensor
    x: torch.Tensor
    gain: torch.Tensor
    projected: torch.Tensor
    mixed: torch.Tensor
    inner: torch.Tensor
    weights: list[list[PackedLinear]]  # a layer: first projection, output projection, gate and up, down
    products: CudaProducts

    @classmethod
    def make(cls, rows: int, layers: int, projected_width: int) -> "Bench":
        first = [
            _fp8(projected_width, k=WIDTH), _fp8(WIDTH, k=6144), _fp8(INNER, INNER, k=WIDTH, interleave=True),
            _fp8(WIDTH, k=INNER),
        ]  # fmt: skip
        weights = [first] + [[replace(w, weights=w.weights.clone()) for w in first] for _ in range(layers - 1)]
        stream = _random(rows, WIDTH, dtype=FP32)
        return cls(
            rows, layers, stream, stream.view(rows, -1, 32).square().sum(-1), (stream * X_SCALE).to(HALF),
            torch.zeros(WIDTH, dtype=BF16, device=CARD), _random(rows, projected_width), _random(rows, 6144),
            _random(rows, INNER), weights, CudaProducts(first, CARD),
        )  # fmt: skip

    def chain(self, mixer: Mixer | None, *, products: bool = True, mixer_reads_x: bool = False) -> None:
        """All layers in the order of a step. mixer_reads_x: before its wait, see Products.store."""
        norm, residual = Norm(self.sumsq, EPS), Residual(self.stream, self.sumsq, self.x, self.gain)
        for layer, (qkvz, out, gate_up, down) in enumerate(self.weights):
            if products:
                self.products.store(self.x, qkvz, self.projected, norm, next_reads_x=mixer_reads_x)
            if mixer:
                mixer(layer)
            if products:
                self.products.add(self.mixed, out, residual)
                self.products.swiglu(self.x, gate_up, self.inner, norm)
                self.products.add(self.inner, down, residual)

    def time_us(self, run: Callable[[], None], repeats: int = 20) -> float:
        """µs a layer: the median of graph replays."""
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        spans = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            spans.append(float(begin.elapsed_time(end)))
        return sorted(spans)[repeats // 2] * 1e3 / self.layers

    def report(self, mixers: dict[str, Mixer]) -> None:
        """A line a mixer, the products alone before and after them."""
        bare = self.time_us(lambda: self.chain(None))
        for name, mixer in mixers.items():
            first = name == GATES_FIRST
            whole = self.time_us(lambda m=mixer, f=first: self.chain(m, mixer_reads_x=f))  # type: ignore[misc]
            alone = self.time_us(lambda m=mixer: self.chain(m, products=False))  # type: ignore[misc]
            print(
                f"rows {self.rows:2} {name:44} layer {whole:7.2f} us  mixer in it {whole - bare:6.2f}  "
                f"mixers alone {alone:6.2f}",
                flush=True,
            )
        again = self.time_us(lambda: self.chain(None))
        print(f"rows {self.rows:2} products alone {bare:.2f} us a layer, again {again:.2f}", flush=True)


def _random(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(shape, device=CARD).to(dtype)


def _fp8(*sizes: int, k: int, interleave: bool = False) -> PackedLinear:
    scale = 0.5 * k**-0.5
    parts = [
        (_random(n, k, dtype=torch.float8_e4m3fn), torch.full((-(-n // 128), -(-k // 128)), scale, device=CARD))
        for n in sizes
    ]
    return pack_fp8(parts, interleave=interleave)


def _gdn_layers(layers: int) -> tuple[list[GdnWeights], list[GdnCache]]:
    weights = [
        GdnWeights(
            _random(HEADS, WIDTH, dtype=BF16) * 0.01, _random(HEADS, WIDTH, dtype=BF16) * 0.01,
            _random(HEADS, dtype=FP32), _random(HEADS, dtype=FP32), _random(CHANNELS, 4, dtype=FP32) * 0.5,
            _random(128, dtype=BF16),
        )
        for _ in range(layers)
    ]  # fmt: skip
    caches = [GdnCache.allocate(HEADS, 128, 128, CHANNELS, HALF, CARD) for _ in range(layers)]
    for cache in caches:
        cache.state.normal_()
        cache.raw.normal_()
        cache.v.normal_()
        cache.decay.uniform_(0.5, 1)
        cache.beta.uniform_(0, 1)
        cache.k.copy_(torch.nn.functional.normalize(torch.randn_like(cache.k), dim=-1))
    return weights, caches


_EMPTY = """extern "C" __global__ void empty(const __grid_constant__ int unused) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}"""


class _Nothing(ctypes.Structure):
    _fields_ = [("unused", ctypes.c_int)]


def empty_mixers() -> dict[str, Mixer]:
    """What the boundaries alone cost: one, two and three kernels in a row that only wait for the one before."""
    if torch.cuda.get_device_capability() < (9, 0):
        return {}
    binary = CudaKernel.load(compile_cubin(_EMPTY, 90, {}), "empty", 0)

    def form(count: int) -> Mixer:
        def mix(layer: int) -> None:
            for _ in range(count):
                binary.launch(96, 256, _Nothing(), torch.cuda.current_stream().cuda_stream, overlap=True)

        return mix

    return {f"{count} empty kernels": form(count) for count in (1, 2, 3)}


def gdn_mixers(bench: Bench, weights: list[GdnWeights], caches: list[GdnCache]) -> dict[str, Mixer]:
    """The three kernels, the fused one, and forms of it."""
    rows = bench.rows
    positions = torch.tensor([104 + rows, 104, 104, 0], dtype=torch.int32, device=CARD)
    q, o = _random(16, 16, 128, dtype=FP32), _random(rows, HEADS, 128, dtype=FP32)
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    launch = Launch(pdl)

    def separate(i: int) -> None:
        gdn_prepare(bench.projected, bench.x, bench.sumsq, weights[i], caches[i], q, EPS, positions, launch=launch)
        gdn_recur(q, caches[i], positions, o, launch=launch)
        z = bench.projected[:, CHANNELS:]
        gate_output(o, z, weights[i].norm, EPS, bench.mixed, launch=launch)

    def fused(i: int) -> None:
        gdn_step(
            bench.projected, bench.x, bench.sumsq, weights[i], caches[i], EPS, positions, bench.mixed, overlap=pdl
        )  # fmt: skip

    def form(columns: int, **changes: int) -> Mixer:
        made = definitions(rows, bench.projected.stride(0), WIDTH, weights[0], caches[0], columns) | changes
        binary = kernel(SOURCE, "gdn", 90, made["SHARED_BYTES"], tuple(sorted(made.items())))
        calls = [
            arguments_of(bench.projected, bench.x, bench.sumsq, weights[i], caches[i], EPS, positions, bench.mixed)
            for i in range(bench.layers)
        ]
        grid, threads = HEADS * made["SPLIT"], 128 // made["SPLIT"] * 4
        return lambda i: binary.launch(
            grid, threads, calls[i], torch.cuda.current_stream().cuda_stream, overlap=pdl
        )  # fmt: skip

    mixers: dict[str, Mixer] = {"gdn: three kernels": separate, "gdn: fused": fused}
    if pdl:
        mixers |= {
            "gdn: fused, next at once": form(CTA_COLUMNS, NEXT_STARTS=0),
            "gdn: fused, 112 registers": form(CTA_COLUMNS, REGISTERS=112),
            "gdn: fused, next when its rows are here": form(CTA_COLUMNS, NEXT_STARTS=2),
            GATES_FIRST: form(CTA_COLUMNS, GATES_EARLY=1),
        }
    return mixers


def check_gdn(rows: int) -> Iterator[str]:
    """Errors of the fused kernel, and of the three, against the twin on the card: outputs and what is left behind."""
    weights, caches = _gdn_layers(1)
    projected, stream = _random(rows, CHANNELS + 6144), _random(rows, WIDTH, dtype=FP32)
    x, sumsq = (stream * X_SCALE).to(HALF), stream.view(rows, -1, 32).square().sum(-1)
    positions = torch.tensor([104 + rows, 104, 104, 0], dtype=torch.int32, device=CARD)
    q, o = _random(16, 16, 128, dtype=FP32), _random(rows, HEADS, 128, dtype=FP32)
    results = {}
    for name in ("twin", "fused", "fused again", "three kernels"):
        cache = GdnCache(*(getattr(caches[0], field.name).clone() for field in fields(GdnCache)))
        out = torch.full((rows, 6144), float("nan"), dtype=HALF, device=CARD)
        if name == "three kernels":
            gdn_prepare(projected, x, sumsq, weights[0], cache, q, EPS, positions)
            gdn_recur(q, cache, positions, o)
            gate_output(o, projected[:, CHANNELS:], weights[0].norm, EPS, out)
        else:
            run = gdn_step_naive if name == "twin" else gdn_step
            run(projected, x, sumsq, weights[0], cache, EPS, positions, out)
        results[name] = {"out": out} | {field.name: getattr(cache, field.name) for field in fields(GdnCache)}
    for name in ("fused", "three kernels"):
        errors = {
            part: ((value.double() - truth.double()).norm() / truth.double().norm()).item()
            for (part, value), truth in zip(results[name].items(), results["twin"].values(), strict=True)
        }
        yield f"rows {rows:2} {name} against the twin: " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items())
    same = all(torch.equal(results["fused"][k], results["fused again"][k]) for k in results["fused"])
    yield f"rows {rows:2} fused run twice: {'bit-equal' if same else 'DIFFERENT'}"


def attention_mixers(bench: Bench, length: int) -> dict[str, Mixer]:
    """rope_qk, split and combine at one length."""
    capacity, rows = length + 32, bench.rows
    keys, values = ([_random(4, capacity, 256) for _ in range(bench.layers)] for _ in range(2))
    q = _random(rows, 24, 256)
    norm, table = _random(256, dtype=BF16), rope_tables(64, 1e7, capacity, CARD)
    positions = torch.tensor([length, 0, 0, 0], dtype=torch.int32, device=CARD)
    segments = segments_for(torch.cuda.get_device_properties(CARD).multi_processor_count, 4)
    scratch = [torch.empty(segments * rows * 24 * size, device=CARD) for size in (256, 1, 1)]
    launch = Launch(torch.cuda.get_device_capability() >= (9, 0))

    def separate(i: int) -> None:
        rope_qk(bench.projected, norm, norm, EPS, table, positions, q, keys[i], values[i], launch=launch)
        verify_attention(
            q, keys[i], values[i], positions, bench.projected, scratch[0], scratch[1], scratch[2], bench.mixed,
            segments=segments, launch=launch,
        )  # fmt: skip

    return {f"attention at {length}: three kernels": separate}


@click.command(help=__doc__)
@rows_option("4")
@click.option("--layers", default=16)
@click.option("--lengths", type=COUNTS, default="128,8192")
@click.option("--parts", type=NamesOf(("gdn", "attention")), default="gdn,attention")
@on_card
def main(row_counts: list[int], layers: int, lengths: list[int], parts: list[str]) -> None:
    """Print one line a mixer."""
    require_card()
    print(torch.cuda.get_device_name(), flush=True)
    for rows in row_counts:
        if "gdn" in parts:
            print("\n".join(check_gdn(rows)), flush=True)
            bench = Bench.make(rows, layers, CHANNELS + 6144)
            bench.report(empty_mixers() | gdn_mixers(bench, *_gdn_layers(layers)))
        if "attention" in parts:
            bench = Bench.make(rows, layers, 14336)
            for length in lengths:
                bench.report(attention_mixers(bench, length))


if __name__ == "__main__":
    main()
