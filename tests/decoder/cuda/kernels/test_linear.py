"""Packing to the byte, the streamed linear layer against its twin, and its machine code without a card."""

import ctypes

import pytest
import torch
from kernarc.decoder.cuda.kernels import linear as linear_module
from kernarc.decoder.cuda.kernels.linear import (
    SOURCE,
    X_SCALE,
    Norm,
    Residual,
    Workspace,
    linear,
    linear_reference,
)
from kernarc.decoder.cuda.kernels.linear_shape import Epilogue, Shape, Variant, shape_of, slots
from kernarc.decoder.cuda.kernels.nvrtc import compile_cubin
from kernarc.decoder.cuda.kernels.packing import PackedLinear, pack_bf16, pack_fp8, unpack
from kernarc.decoder.cuda.limits import MAX_DRAFTS
from kernarc.decoder.cuda.session import CATCH_UP_ROWS
from kernarc.decoder.errors import CheckpointError, DecoderError

from .errors import relative_error

SHAPES_27B = {  # name: (N, K, scale mode, interleaved)
    "gate_up": (34816, 5120, 1, True),
    "down": (5120, 17408, 0, False),
    "out": (5120, 6144, 0, False),
    "qkvz": (16384, 5120, 0, False),
    "qkv": (14336, 5120, 0, False),
}
FIRST_ARCH, SECOND_ARCH = 80, 90


def random_fp8(n: int, k: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Any finite e4m3 bytes, scales between 0 and 1."""
    raw = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device)
    raw[(raw & 0x7F) == 0x7F] = 0x3C
    return raw.view(torch.float8_e4m3fn), torch.rand(-(-n // 128), -(-k // 128), device=device).bfloat16()


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """W[i, j] · scale[i // 128, j // 128], element by element."""
    rows, columns = torch.arange(weight.shape[0]) // 128, torch.arange(weight.shape[1]) // 128
    return weight.float() * scale.float()[rows.to(scale.device)][:, columns.to(scale.device)]


@pytest.mark.parametrize(("n", "k"), [(16, 8), (128, 128), (272, 640), (144, 136), (2048, 5120)])
def test_unpacking_gives_back_the_scaled_weights(n: int, k: int) -> None:
    weight, scale = random_fp8(n, k)
    assert torch.equal(unpack(pack_fp8([(weight, scale)])), dequantised(weight, scale))
    plain = torch.randn(n, k).bfloat16()
    assert torch.equal(unpack(pack_bf16(plain)), plain.float())


def test_stacked_parts_keep_their_own_ragged_scales() -> None:
    parts = [random_fp8(n, 257 * 8) for n in (48, 176, 16)]
    packed = pack_fp8(parts)
    assert packed.scale_mode == 2
    assert torch.equal(unpack(packed), torch.cat([dequantised(*part) for part in parts]))


def test_gate_and_up_interleave_and_come_apart_again() -> None:
    gate, up = random_fp8(320, 256), random_fp8(320, 256)
    packed = pack_fp8([gate, up], interleave=True)
    assert packed.interleaved
    assert torch.equal(unpack(packed), torch.cat((dequantised(*gate), dequantised(*up))))


@pytest.mark.parametrize("element_bytes", [1, 2])
def test_a_byte_lies_where_the_lane_that_needs_it_loads_it(element_bytes: int) -> None:
    n, k = 256, 384
    raw = torch.randint(0, 0x7F, (n, k * element_bytes), dtype=torch.uint8)
    if element_bytes == 1:
        packed = pack_fp8([(raw.view(torch.float8_e4m3fn), torch.ones(2, 3))])
    else:
        packed = pack_bf16(raw.view(torch.bfloat16))
    for row, byte in ((0, 0), (7, 9), (8, 127), (31, 128), (100, 200), (255, k * element_bytes - 1)):
        chunk, within = divmod(byte, 128)
        warp, lane = (row % 128) // 32 * 4 + within // 32, (row % 8) * 4 + within % 32 // 8
        unit, half = (row % 32) // 16, (row % 16) // 8
        thread = warp * 32 + lane
        offset = (row // 128 * packed.chunks + chunk) * 16384 + unit * 8192 + thread * 16 + half * 8 + within % 8
        assert packed.weights[offset] == raw[row, byte], (row, byte)


def test_damaged_or_misshapen_weights_are_refused_by_name() -> None:
    weight, scale = random_fp8(32, 128)
    damaged = weight.view(torch.uint8).clone()
    damaged[3, 5] = 0xFF
    with pytest.raises(CheckpointError, match=r"layers\.3\.q_proj: an FP8 weight is NaN"):
        pack_fp8([(damaged.view(torch.float8_e4m3fn), scale)], name="layers.3.q_proj")
    with pytest.raises(CheckpointError, match="cannot be packed"):
        pack_bf16(torch.zeros(17, 128))


def test_the_argument_block_matches_the_c_struct() -> None:
    body = SOURCE.read_text().split("struct Arguments {")[1].split("};")[0]
    names = [line.split(";")[0].split()[-1].lstrip("*") for line in body.splitlines() if ";" in line]
    assert names == [field[0] for field in linear_module._Arguments._fields_]
    assert ctypes.sizeof(linear_module._Arguments) == 12 * 8 + 8


@pytest.mark.parametrize(
    ("tiles", "chunks", "processors"), [(40, 136, 132), (272, 40, 132), (1, 80, 132), (2, 1, 132), (40, 48, 108)]
)
def test_every_chunk_has_one_owner_and_the_slots_suffice(tiles: int, chunks: int, processors: int) -> None:
    total, ctas = tiles * chunks, min(processors, tiles * chunks)
    owners = [cta for cta in range(ctas) for _ in range(cta * total // ctas, (cta + 1) * total // ctas)]
    assert len(owners) == total
    assert owners == [((chunk + 1) * ctas - 1) // total for chunk in range(total)]
    packed = PackedLinear(torch.empty(0), torch.empty(1), None, tiles * 128, chunks * 128)
    assert slots(packed, processors) == max(len(set(owners[t * chunks : (t + 1) * chunks])) for t in range(tiles))


@pytest.mark.parametrize("arch", [FIRST_ARCH, SECOND_ARCH])
@pytest.mark.parametrize("name", SHAPES_27B)
def test_the_27b_shapes_compile_and_fit_without_a_card(name: str, arch: int) -> None:
    n, k, mode, interleaved = SHAPES_27B[name]
    packed = PackedLinear(torch.empty(0), torch.empty(1), None, n, k, mode, interleaved)
    epilogue = {"gate_up": Epilogue.SWIGLU, "down": Epilogue.RESIDUAL, "out": Epilogue.RESIDUAL}.get(
        name, Epilogue.STORE
    )
    processors = 132 if arch == SECOND_ARCH else 108
    for rows in (1, 4):
        shape = shape_of(packed, rows, processors, arch)
        cubin = compile_cubin(
            SOURCE.read_text(), arch, shape.definitions(Variant(0, name != "down", epilogue, 0, name == "qkvz"))
        )
        assert cubin[:4] == b"\x7fELF"
        assert shape.shared_bytes <= (163 if arch == FIRST_ARCH else 227) * 1024


@pytest.mark.parametrize("name", SHAPES_27B)
def test_every_row_count_of_a_step_fits_sm90(name: str) -> None:
    n, k, mode, interleaved = SHAPES_27B[name]
    packed = PackedLinear(torch.empty(0), torch.empty(1), None, n, k, mode, interleaved)
    for rows in {*range(1, MAX_DRAFTS + 2), CATCH_UP_ROWS}:
        assert shape_of(packed, rows, 132, SECOND_ARCH).depth >= 4, rows


def test_too_many_rows_for_the_card_is_said_before_launch() -> None:
    packed = PackedLinear(torch.empty(0), torch.empty(1), None, 5120, 17408)
    with pytest.raises(DecoderError, match="16 rows of 17408 columns"):
        shape_of(packed, 16, 108, FIRST_ARCH)


def test_the_emulated_e4m3_of_sm80_is_exact_for_all_bytes() -> None:
    raw = torch.arange(256, dtype=torch.int32)
    raw = raw[(raw & 0x7F) != 0x7F]
    half = ((raw & 0x80) << 8 | (raw & 0x7F) << 7).to(torch.int16).view(torch.float16)
    assert torch.equal(half.float() * 256, raw.to(torch.uint8).view(torch.float8_e4m3fn).float())


CARD_SHAPES = [(256, 128), (96, 5120), (5120, 17408), (992, 160), (512, 10240)]


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize(("n", "k"), CARD_SHAPES)
def test_card_matches_the_twin_and_rows_do_not_see_each_other(n: int, k: int, fp8: bool) -> None:
    torch.manual_seed(0)
    packed = pack_fp8([random_fp8(n, k, "cuda")]) if fp8 else pack_bf16(torch.randn(n, k, device="cuda"))
    workspace = Workspace.for_layers([packed], torch.device("cuda"))
    most = 9 if k > 17000 else 16
    x = torch.randn(most, k, device="cuda").half()
    truth = (x if fp8 else x.bfloat16()).double() @ unpack(packed).double().T
    outputs = {}
    for rows in (1, 2, 3, 4, 5, 8, 9, most):
        out = torch.full((rows, n), float("nan"), device="cuda")
        outputs[rows] = linear(x[:rows].contiguous(), packed, workspace, out=out)
        assert relative_error(out, truth[:rows]) < 1e-5
    assert all(torch.equal(outputs[most][:rows], out) for rows, out in outputs.items())
    ids = linear(x[:4].contiguous(), packed, workspace, epilogue=Epilogue.ARGMAX)
    assert torch.equal(ids, outputs[4].argmax(1))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), CARD_SHAPES)
def test_card_residual_feeds_the_next_norm(n: int, k: int) -> None:
    torch.manual_seed(1)
    packed = pack_fp8([random_fp8(n, k, "cuda")])
    workspace = Workspace.for_layers([packed], torch.device("cuda"))
    x, stream = torch.randn(4, k, device="cuda").half(), torch.randn(4, n, device="cuda")
    weight = (torch.randn(n, device="cuda") * 0.1).bfloat16()
    nan = float("nan")
    residual = Residual(
        stream.clone(),
        torch.full((4, n // 32), nan, device="cuda"),
        torch.full((4, n), nan, device="cuda").half(),
        weight,
    )
    linear(x, packed, workspace, epilogue=Epilogue.RESIDUAL, residual=residual)
    truth = stream + linear_reference(x, packed)
    assert relative_error(residual.stream, truth) < 1e-5
    assert relative_error(residual.sumsq, truth.view(4, -1, 32).square().sum(2)) < 1e-5
    assert relative_error(residual.x, (truth * (1 + weight.float()) * X_SCALE).clamp(-65504, 65504)) < 1e-3


@pytest.mark.gpu
def test_card_norm_and_swiglu_fuse() -> None:
    torch.manual_seed(2)
    rows, k, inner = 4, 5120, 1088
    packed = pack_fp8([random_fp8(inner, k, "cuda"), random_fp8(inner, k, "cuda")], interleave=True)
    workspace = Workspace.for_layers([packed], torch.device("cuda"))
    hidden, weight = torch.randn(rows, k, device="cuda") / 300, torch.randn(k, device="cuda") * 0.1
    sumsq = hidden.view(rows, -1, 32).square().sum(2)
    out = linear(
        (hidden * (1 + weight) * X_SCALE).half(), packed, workspace, epilogue=Epilogue.SWIGLU, norm=Norm(sumsq, 0.05)
    )
    normed = hidden * torch.rsqrt(hidden.square().mean(1, keepdim=True) + 0.05) * (1 + weight)
    gate, up = linear_reference(normed, packed).chunk(2, dim=1)
    assert relative_error(out, torch.nn.functional.silu(gate) * up) < 2e-3


def test_shape_is_hashable_for_the_kernel_cache() -> None:
    assert len({Shape(16, 8, 1, 1, 1, 1, 1, True, 0, 1), Shape(16, 8, 1, 1, 1, 1, 1, True, 0, 1)}) == 1
