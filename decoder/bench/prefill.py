"""The kernels of a prompt at the 27B shapes: µs, bytes, GB/s and the share of the card's copy bandwidth, or TFLOP/s.

`python -m kernarc.decoder.bench.prefill [--rows 8192]` on a card. The delta rule has a bench of its own
(bench.gdn_prefill); how a whole prompt divides: device_check --profile.
"""

from collections.abc import Callable, Iterator

import click
import torch

from ..cuda.attention import attend
from ..cuda.kernels.fp8_rows import Fp8Rows, quantise_rows, rows_in_tiles
from ..cuda.kernels.fp8_swiglu import fp8_swiglu, runs_fp8_swiglu
from ..cuda.kernels.packing import PackedLinear, pack_fp8
from ..cuda.kernels.prefill import add_norm, gated_norm, merge_and_gate, swiglu
from ..cuda.kernels.prefill_fp8 import fp8_product
from ..cuda.kernels.prompt_rope import prompt_rope
from ..cuda.kernels.rope_qk import rope_qk, rope_tables
from ..cuda.kernels.unpack import unpack_into
from .command_line import on_card, require_card, rows_option
from .kernels import BF16, CARD, CHANNELS, FP32, HALF, HEADS, INNER, WIDTH, Case, copy_gb_per_s, print_case

CALLS = 4  # in a graph; a call moves more than L2 holds
QUERY_HEADS, KEY_HEADS, HEAD_DIM = 24, 4, 256
PROJECTED = (2 * QUERY_HEADS + 2 * KEY_HEADS) * HEAD_DIM
PRODUCTS = {
    "qkv + z": (CHANNELS + 6144, WIDTH),
    "output projection": (WIDTH, 6144),
    "gate + up": (2 * INNER, WIDTH),
    "down": (WIDTH, INNER),
}


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=CARD).to(dtype)


def row_cases(rows: int) -> Iterator[Case]:
    """The kernels bound by bytes."""

    def case(name: str, bytes_a_row: int, call: Callable[[], object]) -> Case:
        return Case(name, rows * bytes_a_row, CALLS, lambda _: call())

    stream, y = _random(rows, WIDTH, dtype=FP32), _random(rows, WIDTH, dtype=BF16)
    norm, wide, narrow = _random(WIDTH, dtype=BF16), torch.empty_like(y), Fp8Rows.empty(rows, WIDTH, CARD)
    both = 4 + 2 + 4
    yield case("add + norm to bf16", WIDTH * (both + 2), lambda: add_norm(stream, y, norm, 1e-6, wide=wide))
    yield case("add + norm to FP8", WIDTH * (both + 1), lambda: add_norm(stream, y, norm, 1e-6, wide=None, fp8=narrow))
    yield case("add + norm to both", WIDTH * (both + 3), lambda: add_norm(stream, y, norm, 1e-6, wide=wide, fp8=narrow))
    yield case("quantise", WIDTH * 3, lambda: quantise_rows(y))
    gate_up, inner = _random(rows, 2 * INNER, dtype=BF16), Fp8Rows.empty(rows, INNER, CARD)
    yield case("SwiGLU to FP8", INNER * 5, lambda: swiglu(gate_up, inner))
    mixed = Fp8Rows.empty(rows, 6144, CARD)
    o, z, small = _random(rows, HEADS, 128, dtype=HALF), _random(rows, 16384, dtype=BF16), _random(128, dtype=BF16)
    yield case("gated norm to FP8", 6144 * 5, lambda: gated_norm(o, z[:, CHANNELS:], small, 1e-6, mixed))
    qkv, head_norm, table = (
        _random(rows, PROJECTED, dtype=BF16),
        _random(256, dtype=BF16),
        rope_tables(64, 1e7, rows, CARD),
    )
    positions = torch.zeros(4, dtype=torch.int32, device=CARD)
    q = torch.empty(rows, QUERY_HEADS, HEAD_DIM, dtype=HALF, device=CARD)
    keys, values = (torch.empty(KEY_HEADS, rows, HEAD_DIM, dtype=HALF, device=CARD) for _ in range(2))
    for name, turn in (("a program four heads", prompt_rope), ("a program a head", rope_qk)):
        yield case(
            f"rotation, {name}", (QUERY_HEADS + 2 * KEY_HEADS) * HEAD_DIM * 4,
            lambda turn=turn: turn(qkv, head_norm, head_norm, 1e-6, table, positions, q, keys, values),  # type: ignore[misc]
        )  # fmt: skip
    one, log = _random(QUERY_HEADS, rows, HEAD_DIM, dtype=HALF), torch.zeros(QUERY_HEADS, rows, device=CARD)
    yield case("gate to FP8", 6144 * 5, lambda: merge_and_gate((one, log), None, qkv, mixed))
    yield case("merge + gate to FP8", 6144 * 7, lambda: merge_and_gate((one, log), (one, log), qkv, mixed))


def matrix_cases(rows: int) -> Iterator[tuple[Case, int]]:
    """(case, floating-point operations a call): each matrix unpacked, then its product; attention without a past."""
    for name, (n, k) in PRODUCTS.items():
        packed = _packed(n, k)
        room = torch.empty(n * k, dtype=torch.uint8, device=CARD)

        def unpacked(_: int, packed: PackedLinear = packed, room: torch.Tensor = room) -> torch.Tensor:
            return unpack_into(packed, room)

        yield Case(f"unpack {name}", 2 * n * k, CALLS, unpacked), 0
        x, scales = quantise_rows(_random(rows, k, dtype=BF16)), packed.scales
        weights = unpack_into(packed, room).view(torch.float8_e4m3fn)
        assert scales is not None

        def multiply(_: int, x: Fp8Rows = x, w: torch.Tensor = weights, s: torch.Tensor = scales) -> None:
            fp8_product(x, w, s, BF16)

        yield Case(f"FP8 product {name}", rows * (k + 2 * n) + n * k, CALLS, multiply), 2 * rows * n * k
    yield from _swiglu_case(rows)
    query = _random(1, QUERY_HEADS, rows, HEAD_DIM, dtype=HALF)
    keys = _random(1, KEY_HEADS, rows, HEAD_DIM, dtype=HALF)
    operations = 2 * QUERY_HEADS * rows * rows * HEAD_DIM  # two products over half of the square
    num_bytes = (2 * query.numel() + 2 * keys.numel()) * 2
    yield Case("attention", num_bytes, CALLS, lambda _: attend(query, keys, keys, 0, cudnn=True)), operations


def _swiglu_case(rows: int) -> Iterator[tuple[Case, int]]:
    if CARD.type == "cuda" and not runs_fp8_swiglu(CARD):
        return
    x = rows_in_tiles(quantise_rows(_random(rows, WIDTH, dtype=BF16)))
    weights, scales = _random(2 * INNER, WIDTH, dtype=torch.float8_e4m3fn), torch.ones(2 * INNER // 128, WIDTH // 128)
    scales, out = scales.to(CARD) * 0.02, Fp8Rows.empty(rows, INNER, CARD)
    num_bytes = rows * (WIDTH + INNER) + 2 * INNER * WIDTH
    case = Case("gate, up and SwiGLU to FP8", num_bytes, CALLS, lambda _: fp8_swiglu(x, weights, scales, out))
    yield case, 2 * rows * 2 * INNER * WIDTH


def _packed(n: int, k: int) -> PackedLinear:
    return pack_fp8([(_random(n, k, dtype=torch.float8_e4m3fn), torch.ones(n // 128, k // 128, device=CARD))])


@click.command(help=__doc__)
@rows_option("8192")
@on_card
def main(row_counts: list[int]) -> None:
    """Print one line a kernel and row count."""
    require_card()
    ceiling = copy_gb_per_s()
    print(f"{torch.cuda.get_device_name()}, copy {ceiling:.0f} GB/s")
    for rows in row_counts:
        for case in row_cases(rows):
            print_case(case, rows, ceiling)
        for case, operations in matrix_cases(rows):
            print_case(case, rows, ceiling, operations)


if __name__ == "__main__":
    main()
