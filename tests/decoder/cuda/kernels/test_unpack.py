"""unpack.cu against its twin: on a card the kernel itself, without one its source in the emulator."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernarc.decoder.cuda.kernels.fp8_rows import from_tiles
from kernarc.decoder.cuda.kernels.nvrtc import compile_cubin
from kernarc.decoder.cuda.kernels.packing import PackedLinear, pack_bf16, pack_fp8, pack_int8, unpack
from kernarc.decoder.cuda.kernels.unpack import SOURCE, arguments_of, definitions, unpack_bytes, unpack_into
from kernarc.decoder.errors import DecoderError

from .emulator import COMPILER, emulate

Unpack = Callable[..., torch.Tensor]


@pytest.fixture
def run(device: str, tmp_path_factory: pytest.TempPathFactory) -> Unpack:
    if device == "cuda":
        return unpack_into
    if COMPILER is None:
        pytest.skip("the emulator needs g++")
    folder: Path = tmp_path_factory.mktemp("emulated")

    def emulated(packed: PackedLinear, out: torch.Tensor, *, tiled: bool = False) -> torch.Tensor:
        dense = out.view(-1)[: packed.n * packed.k].view(packed.n, packed.k)
        grid = packed.tiles * packed.chunks
        made = definitions(packed, out.dtype, tiled=tiled)
        emulate(SOURCE, "unpack", made, arguments_of(packed, dense), folder, grid=grid, together=1)
        return dense

    return emulated


def _on(device: str, packed: PackedLinear) -> PackedLinear:
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(packed)
        if isinstance(value := getattr(packed, field.name), torch.Tensor)
    }
    return dataclasses.replace(packed, **moved)


def _packings(rows: int, columns: int) -> list[PackedLinear]:
    values = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    values[(values & 0x7F) == 0x7F] = 0x3F  # NaN codes are refused by the packing
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    parts = [(part.view(torch.float8_e4m3fn), scale) for part in (values, values.flip(0))]
    dense = torch.randn(rows, columns).to(torch.bfloat16)
    return [pack_fp8(parts[:1]), pack_fp8(parts), pack_fp8(parts, interleave=True), pack_bf16(dense)]


@pytest.mark.parametrize(("rows", "columns"), [(144, 264), (128, 128), (32, 40)])
def test_unpacking_gives_back_the_weights(rows: int, columns: int, run: Unpack, device: str) -> None:
    for packed in _packings(rows, columns):
        on_device, size, expected = _on(device, packed), packed.n * packed.k, unpack(packed)
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.full((size + 8,), float("nan"), dtype=dtype, device=device)
            assert torch.equal(run(on_device, out).cpu(), expected.to(dtype))
            assert out[size:].isnan().all()
        if packed.is_fp8:  # as bytes, without scales
            raw = torch.full((size + 8,), 0x7F, dtype=torch.uint8, device=device)
            unscaled = unpack(dataclasses.replace(packed, scales=torch.ones_like(packed.scales)))
            assert torch.equal(run(on_device, raw).view(torch.float8_e4m3fn).float().cpu(), unscaled)
            assert (raw[size:] == 0x7F).all()


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384)])
def test_bytes_are_unpacked_into_tiles(rows: int, columns: int, run: Unpack, device: str) -> None:
    for packed in _packings(rows, columns)[:3]:
        in_rows, in_tiles = (
            torch.full((packed.n * packed.k + 8,), 0x7F, dtype=torch.uint8, device=device) for _ in range(2)
        )
        assert torch.equal(
            from_tiles(run(_on(device, packed), in_tiles, tiled=True)), run(_on(device, packed), in_rows)
        )
        assert (in_tiles[packed.n * packed.k :] == 0x7F).all()


def test_the_twin_gives_the_same_bytes() -> None:
    for packed in _packings(144, 264)[:3]:
        raw = torch.empty(packed.n * packed.k, dtype=torch.uint8)
        assert torch.equal(unpack_into(packed, raw), unpack_bytes(packed))
        wide = unpack_into(packed, torch.empty(packed.n, packed.k))
        assert torch.equal(wide, unpack(packed))


def test_what_cannot_be_written_is_refused() -> None:
    dense = torch.randn(128, 128).to(torch.bfloat16)
    with pytest.raises(DecoderError, match=r"bf16 weights as torch\.uint8"):
        definitions(pack_bf16(dense), torch.uint8)
    with pytest.raises(DecoderError, match=r"32 x 40 weights as torch\.uint8 in tiles"):
        definitions(_packings(32, 40)[0], torch.uint8, tiled=True)
    with pytest.raises(DecoderError, match="int8 weights"):
        definitions(pack_int8(dense.to(torch.int8), torch.ones(1, 1)), torch.bfloat16)
    with pytest.raises(DecoderError, match=r"FP8 weights as torch\.float16"):
        definitions(_packings(32, 40)[0], torch.float16)


@pytest.mark.parametrize("arch", [80, 90])
def test_it_compiles(arch: int) -> None:
    for packed, dtype in (
        (packing, dtype) for packing in _packings(32, 40) for dtype in (torch.bfloat16, torch.float32)
    ):
        assert compile_cubin(SOURCE.read_text(), arch, definitions(packed, dtype))
    assert compile_cubin(SOURCE.read_text(), arch, definitions(_packings(32, 40)[2], torch.uint8))
    assert compile_cubin(SOURCE.read_text(), arch, definitions(_packings(128, 128)[2], torch.uint8, tiled=True))
