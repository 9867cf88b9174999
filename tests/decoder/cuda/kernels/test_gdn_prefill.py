"""The delta rule over rows of a prompt, in both of its forms, against token by token.

On a card the CUDA C++ form itself runs; without one its source runs in the emulator (emulator.py).
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import triton
from kernarc.decoder.cuda.kernels.gdn_prefill import CUDA, TRITON, Form, forms, gdn_prefill, is_right
from kernarc.decoder.cuda.kernels.gdn_prefill_cuda import (
    CONV_SOURCE,
    SOURCE,
    HeadShape,
    conv_cuda,
    conv_definitions,
    conv_reads,
    definitions,
    delta_rule_cuda,
)
from kernarc.decoder.cuda.kernels.gdn_prepare import conv_naive
from kernarc.decoder.cuda.kernels.gdn_verify import delta_rule_naive
from kernarc.decoder.cuda.kernels.nvrtc import SHARED_LIMIT_BYTES, compile_cubin

from .emulator import COMPILER, emulate
from .errors import relative_error

HEADS, KEY_HEADS, DIM, TAPS = 2, 1, 16, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
Result = TypeVar("Result")


def poisoned(form: Form) -> Form:
    """The same with NaN in whatever it allocates."""

    def fill(kernels: Callable[..., Result]) -> Callable[..., Result]:
        def run(*arguments: object) -> Result:
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True, warn_only=True)  # fills empty tensors with NaN
            try:
                return kernels(*arguments)
            finally:
                torch.use_deterministic_algorithms(before)

        return run

    return Form(form.name, form.reads, fill(form.convolve), fill(form.delta_rule))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where emulated kernels are compiled to."""
    return tmp_path_factory.mktemp("emulated")


def by_hand_form(arch: int, folder: Path) -> Form:
    """The CUDA C++ form for sm_80 or sm_90: on the card, or emulated."""
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() < (arch // 10, 0):
            pytest.skip("this card cannot run it")
        return poisoned(Form("cuda", conv_reads, conv_cuda, partial(delta_rule_cuda, arch=arch)))
    if COMPILER is None:
        pytest.skip("neither a GPU nor g++ here")

    def run(source: Path, name: str, made: dict[str, int], arguments: ctypes.Structure, ctas: int) -> None:
        emulate(source, name, made, arguments, folder, grid=ctas, together=1)

    rule = partial(delta_rule_cuda, run=run, arch=arch)
    return poisoned(Form("emulated", conv_reads, partial(conv_cuda, run=run), rule))


@pytest.fixture(params=[80, 90], ids=["sm_80", "sm_90"])
def by_hand(request: pytest.FixtureRequest, folder: Path) -> Form:
    return by_hand_form(request.param, folder)


@pytest.fixture(params=[None, 80, 90], ids=["triton", "sm_80", "sm_90"])
def form(request: pytest.FixtureRequest, folder: Path) -> Form:
    return by_hand_form(request.param, folder) if request.param else TRITON


@pytest.mark.parametrize("lengths", [[1], [64], [70, 33], [5, 1, 3]], ids=str)
@pytest.mark.parametrize("repeated_keys", [False, True])
def test_pieces_equal_token_by_token(lengths: list[int], repeated_keys: bool, form: Form, device: str) -> None:
    torch.manual_seed(sum(lengths))
    total = sum(lengths)
    rows = torch.randn(total, CHANNELS + HEADS * DIM, device=device)
    if repeated_keys:  # the same token over and over: powers of the triangular system would explode
        rows[:] = rows[:1]
    rows = rows.to(torch.float16)
    conv = torch.randn(CHANNELS, TAPS, device=device) * 0.5
    g = -torch.rand(total, HEADS, device=device) * (0.01 if repeated_keys else 0.5)
    beta = torch.rand(total, HEADS, device=device)
    raw = torch.full((32, CHANNELS), float("nan"), dtype=torch.float16, device=device)
    state = torch.zeros(HEADS, DIM, DIM, device=device)
    pieces, start = [], 0
    for length in lengths:
        piece = slice(start, start + length)
        pieces.append(gdn_prefill(rows[piece], raw, conv, g[piece], beta[piece], state, start, form))
        slots = torch.arange(start, start + length, device=device)[-32:]
        raw[slots % 32] = rows[slots, :CHANNELS]
        start += length
    mixed = conv_naive(rows.new_zeros(TAPS - 1, CHANNELS), rows[:, :CHANNELS], conv).float()
    q, k, v = mixed.split([KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM], dim=1)
    heads = [x.view(total, KEY_HEADS, DIM) for x in (q, k)]
    q, k = ((x * torch.rsqrt(x.square().sum(-1, True) + 1e-6)).repeat_interleave(HEADS // KEY_HEADS, 1) for x in heads)
    expected, final = delta_rule_naive(
        q * DIM**-0.5, k, v.view(total, HEADS, DIM), g.exp(), beta, torch.zeros_like(state)
    )
    assert relative_error(torch.cat(pieces), expected) < 3e-3
    assert relative_error(state, final) < 3e-3


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_inputs(length: int, shape: tuple[int, int, int, int], device: str) -> Inputs:
    """(q, k, v, g, beta, state) as a delta rule takes them; the buffers go on with NaN. shape: key heads, H, K, V."""
    key_heads, heads, key_dim, value_dim = shape
    torch.manual_seed(length)
    beyond = 70

    def followed_by_nan(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.new_full((beyond, *x.shape[1:]), float("nan"))]).to(device)[:length]

    def unit() -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(length, key_heads, key_dim), dim=-1)

    q, k, v = unit() * key_dim**-0.5, unit(), torch.randn(length, heads, value_dim)
    g, beta = -torch.rand(length, heads) * 0.3, torch.rand(length, heads)
    halves = [followed_by_nan(x.half()) for x in (q, k, v)]
    return (*halves, followed_by_nan(g), followed_by_nan(beta), torch.randn(heads, key_dim, value_dim).to(device))  # type: ignore[return-value]


def exact(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, final state), token by token in fp64."""
    q, k, v, g, beta, state = (x.double() for x in inputs)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    return delta_rule_naive(q, k, v, g.exp(), beta, state)


SHAPES = {
    "as in the 27B": (1, 3, 128, 128),
    "two key heads": (2, 2, 64, 64),
    "odd columns": (1, 1, 48, 80),
    "wide keys": (1, 2, 128, 16),
}


@pytest.mark.parametrize("length", [1, 64, 129])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_and_length(shape: tuple[int, int, int, int], length: int, by_hand: Form, device: str) -> None:
    inputs = random_inputs(length, shape, device)
    expected, final = exact(inputs)
    out = by_hand.delta_rule(*inputs)
    assert relative_error(out, expected) < 1e-3
    assert relative_error(inputs[-1], final) < 1e-3


@pytest.mark.parametrize("log_decay", [0.0, -1e-3, -30.0])
def test_one_key_over_and_over(log_decay: float, by_hand: Form, device: str) -> None:
    """With beta = 1 a token erases what the one before it wrote: the inverse is full of sums that cancel."""
    inputs = random_inputs(130, (1, 2, 32, 32), device)
    q, k, _, g, beta, state = inputs
    q[:], k[:], g[:], beta[:] = q[:1].clone(), k[:1].clone(), log_decay, 1.0
    expected, final = exact(inputs)
    out = by_hand.delta_rule(*inputs)
    assert relative_error(out, expected) < 3e-3
    assert relative_error(state, final) < 3e-3


def test_two_runs_are_equal_to_the_bit(by_hand: Form, device: str) -> None:
    inputs = random_inputs(200, (1, 2, 32, 64), device)
    again = (*inputs[:-1], inputs[-1].clone())
    assert torch.equal(by_hand.delta_rule(*inputs), by_hand.delta_rule(*again))
    assert torch.equal(inputs[-1], again[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 64, 48), (1, 2, 16, 16), (5, 5, 128, 128)], ids=str)
def test_convolution_equals_its_twin(
    shape: tuple[int, int, int, int], dtype: torch.dtype, by_hand: Form, device: str
) -> None:
    """Rows 30 to 99 of a prompt, after earlier ones in the ring; then its first row, which has none before it."""
    torch.manual_seed(1)
    layer = HeadShape(*shape)
    keys, channels = (
        layer.key_heads * layer.key_dim,
        2 * layer.key_heads * layer.key_dim + layer.heads * layer.value_dim,
    )
    rows, weight = torch.randn(100, channels + 24, device=device).to(dtype), torch.randn(channels, TAPS, device=device)
    raw = torch.full((32, channels), float("nan"), dtype=torch.float16, device=device)
    raw[27:30] = rows[27:30, :channels]
    for start, count, history in ((30, 70, rows[27:30, :channels]), (0, 1, rows.new_zeros(3, channels))):
        piece = rows[start : start + count]
        q, k, v = by_hand.convolve(piece, raw, weight, start, layer)
        mixed = conv_naive(history.float(), piece[:, :channels].float(), weight)
        parts = mixed.split([keys, keys, channels - 2 * keys], dim=1)
        unit = [x.view(k.shape) * torch.rsqrt(x.view(k.shape).square().sum(-1, True) + 1e-6) for x in parts[:2]]
        for actual, expected in ((q, unit[0] * layer.key_dim**-0.5), (k, unit[1]), (v, parts[2].view(v.shape))):
            torch.testing.assert_close(actual.float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["fp32", "odd width", "odd start", "16 bits"])
def test_rows_that_the_convolution_does_not_read_go_to_triton(kind: str, by_hand: Form, device: str) -> None:
    """Prefill may be in fp32, and a projection may have any width."""
    torch.manual_seed(2)
    rows = torch.randn(40, CHANNELS + (9 if kind == "odd width" else 8), device=device)
    rows = rows if kind == "fp32" else rows.half()
    rows = rows[:, 1:] if kind == "odd start" else rows
    assert conv_reads(rows) == (kind == "16 bits")
    conv, raw = torch.randn(CHANNELS, TAPS, device=device), torch.zeros(32, CHANNELS, device=device).half()
    g, beta = -torch.rand(40, HEADS, device=device), torch.rand(40, HEADS, device=device)
    states = [torch.zeros(HEADS, DIM, DIM, device=device) for _ in range(2)]
    outs = [gdn_prefill(rows, raw, conv, g, beta, s, 0, f) for s, f in zip(states, (by_hand, TRITON), strict=True)]
    assert relative_error(outs[0], outs[1]) < 3e-3
    assert relative_error(states[0], states[1]) < 3e-3


def test_a_wrong_delta_rule_is_noticed(form: Form, device: str) -> None:
    def check(form: Form) -> bool:
        return is_right((HEADS, DIM, DIM), CHANNELS, TAPS, torch.device(device), form)

    assert check(form)

    def nan_in_one_head(*tensors: torch.Tensor) -> torch.Tensor:
        out = form.delta_rule(*tensors)  # type: ignore[call-arg]
        out[0, 1] = float("nan")
        return out

    assert not check(Form("wrong", form.reads, form.convolve, nan_in_one_head))


def test_other_shapes_are_left_to_triton() -> None:
    card = torch.device("cuda")
    assert forms(card, 128, 128, 4) == [CUDA, TRITON]
    others = ((torch.device("cpu"), 128, 128, 4), (card, 256, 128, 4), (card, 128, 8, 4), (card, 128, 128, 3))
    for device, *sizes in others:
        assert forms(device, *sizes) == [TRITON]


def _resources(cubin: bytes, path: Path) -> str | None:
    """What the disassembler says of registers and memory, where there is one."""
    packaged = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    disassembler = shutil.which("cuobjdump") or (str(packaged) if packaged.exists() else None)
    if disassembler is None:
        return None
    path.write_bytes(cubin)
    return subprocess.run([disassembler, "-res-usage", path], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("kernel", ["convolve", "chunk", "walk"])
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("shape", [(16, 48, 128, 128), (1, 2, 16, 16)], ids=str)
def test_kernels_compile_for_both_cards_without_one(
    shape: tuple[int, int, int, int], arch: int, kernel: str, tmp_path: Path
) -> None:
    layer = HeadShape(*shape)
    if kernel == "convolve":
        source, made = CONV_SOURCE, conv_definitions(layer, 16384, torch.bfloat16)
    else:
        source, made = SOURCE, definitions(layer, walk=kernel == "walk", arch=arch)
    assert made["SHARED_BYTES"] + 1024 <= SHARED_LIMIT_BYTES[arch] // (1 if kernel == "walk" else 2)
    usage = _resources(compile_cubin(source.read_text(), arch, made), tmp_path / "kernel.cubin")
    if usage is not None:  # some versions of the compiler keep a few addresses on the stack
        assert int(usage.split(" STACK:")[1].split()[0]) <= 32
        assert " LOCAL:0 " in usage
