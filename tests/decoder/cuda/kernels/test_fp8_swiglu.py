"""The MLP's first half in one FP8 kernel: tiles and their swizzle, the kernel against its twin (card or emulator)."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from kernarc.decoder.cuda.kernels import fp8_swiglu
from kernarc.decoder.cuda.kernels.fp8_rows import Fp8Rows, from_tiles, quantise_rows_naive, rows_in_tiles, to_tiles
from kernarc.decoder.cuda.kernels.fp8_swiglu import DEFINITIONS, SOURCE, arguments_of, fp8_swiglu_naive
from kernarc.decoder.cuda.kernels.nvrtc import SHARED_LIMIT_BYTES, compile_cubin
from kernarc.decoder.cuda.kernels.packing import pack_fp8
from kernarc.decoder.cuda.kernels.prefill_fp8 import fits, fp8_mlp_inner
from kernarc.decoder.cuda.kernels.unpack import unpack_into
from kernarc.decoder.errors import DecoderError

from .emulator import COMPILER, emulate
from .errors import relative_error

Run = Callable[[Fp8Rows, torch.Tensor, torch.Tensor, Fp8Rows], object]


@pytest.fixture
def run(device: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    if device == "cuda":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("for sm_90")
        return partial(fp8_swiglu.fp8_swiglu, clusters=2)
    if COMPILER is None:
        pytest.skip("the emulator needs g++")
    folder = tmp_path_factory.mktemp("emulated")

    def emulated(x: Fp8Rows, weights: torch.Tensor, scales: torch.Tensor, out: Fp8Rows) -> None:
        arguments = arguments_of(x, weights, scales, out, 2)
        emulate(SOURCE, "fp8_swiglu", DEFINITIONS, arguments, folder, grid=4, together=2)

    return emulated


def nan_room(rows: int, width: int, device: str) -> Fp8Rows:
    room = Fp8Rows.empty(rows, width, torch.device(device))
    room.values.view(torch.uint8).fill_(0x7F)
    room.scale.fill_(float("nan"))
    return room


def random_weights(n: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales such that the gate is neither shut nor straight."""
    values = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    return values, (torch.rand(n // 128, k // 128, device=device) + 0.5) / k**0.5


def test_a_tile_holds_every_byte_once_where_the_instruction_looks_for_it() -> None:
    values = torch.arange(256 * 384).remainder(251).to(torch.uint8).view(256, 384)
    tiles = to_tiles(values)
    assert torch.equal(from_tiles(tiles), values)
    flat = tiles.flatten()
    for row, column in ((0, 0), (1, 0), (7, 127), (130, 20), (255, 383), (129, 256)):
        tile, inside = row // 128 * 3 + column // 128, column % 128
        place = tile * 16384 + row % 128 * 128 + (inside // 16 ^ row % 8) * 16 + inside % 16
        assert flat[place] == values[row, column]


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 128, 128), (300, 128, 640), (700, 256, 256), (2050, 384, 128)])
def test_the_kernel_equals_its_twin(rows: int, n: int, k: int, run: Run, device: str) -> None:
    """More blocks of columns than stages, several tasks a cluster, more rows than share a tile of w at a time and rows
    that end inside a tile; tiles of w without a product, ordinary, with gates shut or wide open; NaN in all padding.
    """
    x = rows_in_tiles(quantise_rows_naive(torch.randn(rows, k, device=device)))
    values, scales = random_weights(2 * n, k, device)
    empty = slice(0, 128 if n > 256 else 0)
    scales[: empty.stop // 128] = 0  # the smallest scale, and zeros
    if n > 128:
        scales[n // 128 - 1] *= 100
    found, expected = nan_room(rows, n, device), nan_room(rows, n, device)
    run(x, to_tiles(values), scales, found)
    fp8_swiglu_naive(x, to_tiles(values), scales, expected)
    # On a card a block's product keeps about 13 bits of its sum: 8e-4 was seen.
    torch.testing.assert_close(found.scale[:rows], expected.scale[:rows], rtol=2e-3, atol=0)
    one, other = (room.values[:rows].float() for room in (found, expected))
    same = (one == other).view(rows, -1, 128).float().mean((0, 2))
    assert same.min() > 0.96  # a sum in another order rounds otherwise
    assert relative_error(one, other) < 0.01
    assert one[:, empty].eq(0).all()
    assert found.scale[rows:].isnan().all()
    assert found.values[rows:].view(torch.uint8).eq(0x7F).all()


def test_packed_weights_give_what_a_wide_mlp_gives(device: str) -> None:
    """Through packing, unpacking into tiles and FP8 on the way in and out."""
    values, scales = random_weights(1024, 512, device)
    packed = pack_fp8([(values[:512], scales[:4]), (values[512:], scales[4:])], interleave=True)
    assert fits(packed)
    room = torch.empty(1024 * 512, dtype=torch.uint8, device=device)
    assert torch.equal(from_tiles(unpack_into(packed, room, tiled=True)), unpack_into(packed, room.clone()))
    x = torch.randn(9, 512, device=device)
    out = fp8_mlp_inner(rows_in_tiles(quantise_rows_naive(x)), packed, room)
    gate, up = (x @ (values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)).t()).chunk(2, -1)
    found = out.values[:9].float() * out.scale[:9].repeat_interleave(128, 1)
    assert relative_error(found, F.silu(gate) * up) < 0.06  # two roundings to three bits of mantissa


def test_the_self_check_sees_a_wrong_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, limit = torch.device(device), fp8_swiglu.SELF_CHECK_ERROR
    assert fp8_swiglu._error(where) < limit / 2
    right = fp8_swiglu.fp8_swiglu

    def planted(change: Callable[[Fp8Rows], object]) -> float:
        def wrong(*args: torch.Tensor, clusters: int) -> None:
            change(right(*args, clusters=clusters))  # type: ignore[arg-type]

        monkeypatch.setattr(fp8_swiglu, "fp8_swiglu", wrong)
        return fp8_swiglu._error(where)

    assert planted(lambda out: out.values[2048:2056, 128:256].zero_()) > limit
    assert planted(lambda out: out.values[:, 256:].copy_(out.values[:, :128])) > limit
    assert planted(lambda out: out.scale[700].fill_(float("nan"))) == float("inf")


def test_only_a_card_of_its_kind_runs_it(device: str) -> None:
    on_its_card = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    assert fp8_swiglu.runs_fp8_swiglu(torch.device(device)) == on_its_card


def test_a_kernel_that_does_not_compile_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise DecoderError("cannot compile kernel.cu for sm_90", "no such instruction")

    monkeypatch.setattr(fp8_swiglu, "arch_of", lambda _: fp8_swiglu.ARCH)
    monkeypatch.setattr(fp8_swiglu, "_error", fails)
    assert not fp8_swiglu.runs_fp8_swiglu(torch.device("cuda", 0))
    assert "cannot compile kernel.cu" in caplog.text


def test_it_compiles_for_sm_90_inside_its_shared_memory() -> None:
    assert compile_cubin(SOURCE.read_text(), 90, DEFINITIONS)
    assert SHARED_LIMIT_BYTES[90] >= fp8_swiglu.SHARED_BYTES
