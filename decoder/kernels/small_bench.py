"""Time of the small kernels of a step at the 27B shapes: µs a launch inside one CUDA graph, with and without overlap.

`python -m kernarc.decoder.kernels.small_bench` on a card; 4 verify rows of which 4 were accepted before, states and
caches rotated past L2. Prints one line a kernel.
"""

from collections.abc import Callable

import torch

from .gdn_prepare import GdnCache, GdnWeights, gdn_prepare
from .gdn_verify import gate_output, gdn_recur
from .launch import Launch
from .norm import rms_norm
from .rope_qk import rope_qk, rope_tables
from .verify_attention import segments_for, verify_attention

ROWS, WIDTH, HEADS, CHANNELS = 4, 5120, 48, 10240
LAYERS = 48
CARD = torch.device("cuda", 0)


def time_us(launch: Callable[[int], None], layers: int = LAYERS, repeats: int = 10) -> float:
    """µs a call of launch(layer), over a graph of one call a layer."""
    launch(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            launch(layer)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / repeats / layers


def _random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, device=CARD).to(dtype)


def gdn_calls(launch: Launch) -> dict[str, Callable[[int], None]]:
    """The kernels of a GDN layer, each over its own 48 layers of state."""
    fp32, bf16 = torch.float32, torch.bfloat16
    caches = [GdnCache.allocate(HEADS, 128, 128, CHANNELS, torch.float16, CARD) for _ in range(LAYERS)]
    weights = [
        GdnWeights(
            _random(HEADS, WIDTH, dtype=bf16), _random(HEADS, WIDTH, dtype=bf16), _random(HEADS, dtype=fp32),
            _random(HEADS, dtype=fp32), _random(CHANNELS, 4, dtype=fp32), _random(128, dtype=bf16),
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    rows, x, out = _random(ROWS, 16384), _random(ROWS, WIDTH), _random(ROWS, 6144)
    sumsq = torch.full((ROWS, WIDTH // 32), 32.0, device=CARD)
    q, o = _random(16, 16, 128, dtype=fp32), _random(ROWS, HEADS, 128, dtype=fp32)
    positions = torch.tensor([108, 104, 104, 0], dtype=torch.int32, device=CARD)

    def prepare(layer: int) -> None:
        gdn_prepare(rows, x, sumsq, weights[layer], caches[layer], q, 1e-6, positions, launch=launch)

    def recur(layer: int, columns: int = 16) -> None:
        gdn_recur(q, caches[layer], positions, o, launch=launch, columns=columns)

    def gate(layer: int) -> None:
        gate_output(o, rows[:, CHANNELS:], weights[layer].norm, 1e-6, out, launch=launch)

    def all_three(layer: int) -> None:
        prepare(layer)
        recur(layer)
        gate(layer)

    return {
        "gdn_prepare": prepare,
        "gdn_recur, 8 columns": lambda layer: recur(layer, 8),
        "gdn_recur, 16 columns": recur,
        "gdn_recur, 32 columns": lambda layer: recur(layer, 32),
        "gate_output": gate,
        "gdn, all three": all_three,
    }


def attention_calls(launch: Launch, length: int) -> dict[str, Callable[[int], None]]:
    """The kernels of an attention layer at one length, over 4 layers of cache."""
    capacity = length + 32
    keys, values = ([_random(4, capacity, 256) for _ in range(4)] for _ in range(2))
    qkv, q, out = _random(ROWS, 14336), _random(ROWS, 24, 256), _random(ROWS, 6144)
    norm, table = _random(256, dtype=torch.bfloat16), rope_tables(64, 1e7, capacity, CARD)
    positions = torch.tensor([length, 0, 0, 0], dtype=torch.int32, device=CARD)
    segments = segments_for(torch.cuda.get_device_properties(CARD).multi_processor_count, 4)
    scratch = [torch.empty(3 * segments * ROWS * 24 * size, device=CARD) for size in (256, 1, 1)]

    def rope(layer: int) -> None:
        rope_qk(qkv, norm, norm, 1e-6, table, positions, q, keys[layer % 4], values[layer % 4], launch=launch)

    def attend(waves: int, block_keys: int, num_stages: int) -> Callable[[int], None]:
        def call(layer: int) -> None:
            verify_attention(
                q, keys[layer % 4], values[layer % 4], positions, qkv, scratch[0], scratch[1], scratch[2], out,
                segments=waves * segments, block_keys=block_keys, num_stages=num_stages, launch=launch,
                combine_launch=launch,
            )  # fmt: skip

        return call

    forms = ((1, 64, 3), (2, 64, 2), (2, 32, 3), (1, 128, 2))
    calls: dict[str, Callable[[int], None]] = {f"rope_qk at {length}": rope}
    for form in forms:
        waves, block_keys, num_stages = form
        calls[f"attention at {length}, {waves}×, {block_keys} keys, {num_stages} stages"] = attend(*form)
    return calls


def main() -> None:
    """Print one line a kernel."""
    stream, weight, out = _random(ROWS, WIDTH, dtype=torch.float32), _random(WIDTH), _random(ROWS, WIDTH)
    print(f"{torch.cuda.get_device_name()}, {ROWS} rows; µs a launch: one after the other, overlapped")
    lines: dict[str, list[float]] = {}
    for launch in (Launch(False), Launch(True)):
        calls = gdn_calls(launch)
        calls["rms_norm"] = lambda layer, launch=launch: rms_norm(stream, weight, 1e-6, out, launch=launch)  # type: ignore[misc]
        for length in (128, 8192, 65536):
            calls |= attention_calls(launch, length)
        for name, call in calls.items():
            lines.setdefault(name, []).append(time_us(call))
    for name, (alone, overlapped) in lines.items():
        print(f"{name:48} {alone:7.2f} {overlapped:7.2f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
