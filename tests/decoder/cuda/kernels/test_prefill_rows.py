"""The row kernels of prefill against their twins: SwiGLU, norms, merged attention; each also in FP8."""

import pytest
import torch
from kernarc.decoder.cuda.kernels.fp8_rows import Fp8Rows, from_tiles, quantise_rows, quantise_rows_naive
from kernarc.decoder.cuda.kernels.gdn_verify import gated_norm_naive
from kernarc.decoder.cuda.kernels.norm import rms_norm_naive
from kernarc.decoder.cuda.kernels.packing import pack_fp8, unpack
from kernarc.decoder.cuda.kernels.prefill import (
    add_norm,
    gated_norm,
    merge_and_gate,
    merge_and_gate_naive,
    prompt_gates,
    prompt_gates_naive,
    swiglu,
)
from kernarc.decoder.cuda.kernels.prefill_fp8 import fits, fp8_linear, fp8_product
from kernarc.decoder.cuda.kernels.prompt_rope import prompt_rope
from kernarc.decoder.cuda.kernels.rope_qk import rope_naive, rope_tables

from .errors import relative_error


def nan_rows(rows: int, width: int, device: str, *, tiled: bool = False) -> Fp8Rows:
    out = Fp8Rows.empty(rows, width, torch.device(device), tiled=tiled)
    out.values.view(torch.uint8).fill_(0x7F)
    out.scale.fill_(float("nan"))
    return out


def is_quantised(out: Fp8Rows, expected: torch.Tensor) -> None:
    """`out` holds `expected` [T, K] to e4m3's rounding, each 128 columns under the scale that its largest asks for."""
    rows, device = len(expected), expected.device.type
    assert out.rows == rows
    assert out.values.shape[0] % 4 == 0
    assert out.scale.stride(0) == 1
    torch.testing.assert_close(out.scale[:rows], quantise_rows_naive(expected).scale, rtol=1e-4, atol=1e-9)
    scale = out.scale[:rows, :, None]
    restored = out.values[:rows].float().view(rows, -1, 128) * scale
    wanted = expected.float().view(rows, -1, 128)
    rounding = 1 / 16 if device == "cuda" else 1 / 2  # the interpreter loses the carry of a mantissa that rounds up
    bound = wanted.abs() * rounding + scale * 2**-9  # subnormals
    assert ((restored - wanted).abs() <= bound * 1.002).all()


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_rows_quantise_as_their_twin(rows: int, device: str) -> None:
    x = torch.randn(rows, 640, device=device) * torch.logspace(-6, 3, 640, device=device)
    x[0, :128] = 0
    x = x.to(torch.bfloat16).float()
    is_quantised(quantise_rows(x), x)


@pytest.mark.parametrize("width", [1100, 1280])
def test_swiglu(width: int, device: str) -> None:
    gate_up = torch.randn(5, 2 * width, device=device)
    gate, up = gate_up.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    out = torch.full((5, width), float("nan"), device=device)
    torch.testing.assert_close(swiglu(gate_up, out), expected)
    if width % 128 == 0:
        fp8 = nan_rows(5, width, device)
        assert swiglu(gate_up, fp8) is fp8
        is_quantised(fp8, expected)


@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (3, 128), (16, 16), (18, 128)])
def test_gated_norm(heads: int, dim: int, device: str) -> None:
    o = torch.randn(5, heads, dim, device=device).to(torch.float16)
    wide = torch.randn(5, 52 + heads * dim, device=device)
    weight = torch.randn(dim, device=device)
    expected = gated_norm_naive(o.float(), wide[:, 52:].view(5, heads, dim), weight, 1e-6).flatten(1)
    out = torch.full((5, heads * dim), float("nan"), device=device)
    torch.testing.assert_close(gated_norm(o, wide[:, 52:], weight, 1e-6, out), expected)
    if heads * dim % 128 == 0:
        fp8 = nan_rows(5, heads * dim, device)
        gated_norm(o, wide[:, 52:], weight, 1e-6, fp8)
        is_quantised(fp8, expected)


def test_gates_of_a_prompt(device: str) -> None:
    """Also far from zero, where e^-|a| is lost beside 1."""
    a = torch.tensor([-40.0, -17.0, -12.0, -6.0, -4.2, -4.1, -1.0, 0.0, 0.3, 5.0, 30.0], device=device)
    heads = torch.randn(5, 3, device=device)
    ba = torch.cat([heads.repeat(len(a), 1), a.repeat_interleave(5)[:, None].expand(-1, 3) + 0.0], dim=1)
    a_log, dt_bias = torch.randn(3, device=device), torch.zeros(3, device=device)
    dt_bias[1] = 0.5
    g, beta = prompt_gates(ba, a_log, dt_bias)
    expected = [value.to(g.dtype) for value in prompt_gates_naive(ba.double(), a_log.double(), dt_bias.double())]
    torch.testing.assert_close(g, expected[0], rtol=2e-5, atol=0)
    torch.testing.assert_close(beta, expected[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("width", [96, 160, 384, 640, 1152])
def test_residual_addition_and_norm(width: int, device: str) -> None:
    before, y = torch.randn(5, width, device=device), torch.randn(5, width, device=device)
    weight = torch.randn(width, device=device)
    summed = before + y
    expected = rms_norm_naive(summed, weight, 1e-6)
    for with_wide, with_fp8 in ((True, False), (False, True), (True, True)):
        if with_fp8 and width % 128:
            continue
        stream = before.clone()
        wide = torch.full_like(y, float("nan")) if with_wide else None
        fp8 = nan_rows(5, width, device) if with_fp8 else None
        add_norm(stream, y, weight, 1e-6, wide=wide, fp8=fp8)
        assert torch.equal(stream, summed)
        if wide is not None:
            torch.testing.assert_close(wide, expected)
        if fp8 is not None:
            is_quantised(fp8, expected)


@pytest.mark.parametrize(("rows", "width"), [(5, 640), (300, 640), (130, 1152)])
def test_norms_in_tiles_are_the_norms_in_rows(rows: int, width: int, device: str) -> None:
    """Also where a row is more than one part of the kernel's (1,024 columns)."""
    stream, y, weight = (torch.randn(*size, device=device) for size in ((rows, width), (rows, width), (width,)))
    plain, in_tiles = (nan_rows(rows, width, device, tiled=tiled) for tiled in (False, True))
    for out in (plain, in_tiles):
        add_norm(stream.clone(), y, weight, 1e-6, wide=None, fp8=out)
    values = from_tiles(in_tiles.values.view(torch.uint8))
    assert torch.equal(values[:rows], plain.values[:rows].view(torch.uint8))
    assert torch.equal(in_tiles.scale[:rows], plain.scale[:rows])
    assert len(values) == -(-rows // 256) * 256
    assert values[rows:].eq(0x7F).all()
    assert in_tiles.scale[rows:].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (7, 3), (0, 2), (8, 8)])
@pytest.mark.parametrize(("dim", "turned"), [(16, 8), (64, 64)])
def test_heads_of_a_prompt_are_turned_into_the_cache(
    heads: int, kv_heads: int, dim: int, turned: int, device: str
) -> None:
    """Also where a program holds heads of all kinds, where no queries are left, and behind other rows of the cache."""
    rows, start, capacity = 5, 40, 80
    columns = (2 * heads + 2 * kv_heads) * dim
    qkv = torch.randn(rows, columns + 3, device=device).to(torch.float16)[:, :columns]
    norm_q, norm_k = (torch.randn(dim, device=device).to(torch.float16) * 0.1 for _ in range(2))
    table = rope_tables(turned, 1e7, capacity, device)
    q = torch.full((rows, heads, dim), float("nan"), dtype=torch.float16, device=device)
    keys, values = (torch.full((kv_heads, capacity, dim), float("nan"), device=device).half() for _ in range(2))
    positions = torch.tensor([start, 0, 0, 0], dtype=torch.int32, device=device)
    prompt_rope(qkv, norm_q, norm_k, 1e-6, table, positions, q, keys, values)
    angles, written = table[start : start + rows], slice(start, start + rows)
    asked = qkv[:, : 2 * heads * dim].view(rows, heads, 2, dim)[:, :, 0]
    k, v = qkv[:, 2 * heads * dim :].view(rows, 2, kv_heads, dim).unbind(1)
    torch.testing.assert_close(q, rope_naive(asked, norm_q, 1e-6, angles), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(
        keys[:, written], rope_naive(k, norm_k, 1e-6, angles).transpose(0, 1), rtol=2e-3, atol=2e-3
    )
    assert torch.equal(values[:, written], v.transpose(0, 1))
    for cache in (keys, values):
        assert cache[:, :start].isnan().all()
        assert cache[:, start + rows :].isnan().all()


@pytest.mark.parametrize("two_parts", [False, True])
@pytest.mark.parametrize("dim", [16, 128])
def test_merged_attention_is_attention_over_all_keys(two_parts: bool, dim: int, device: str) -> None:
    """Three heads, rows that see 40 keys, split at key 24; the outputs lie as [T, H, D] in memory."""
    q, k, v = torch.randn(3, 5, dim), torch.randn(3, 40, dim), torch.randn(3, 40, dim)
    qkv = torch.randn(5, 3 * 2 * dim + 7)

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k[:, keys].mT
        out = (scores.softmax(-1) @ v[:, keys]).transpose(0, 1).contiguous().to(device).transpose(0, 1)
        return out, scores.logsumexp(-1).to(device)

    whole = part(slice(40))
    parts = (part(slice(24)), part(slice(24, 40))) if two_parts else ((whole[0], None), None)
    out = torch.full((5, 3 * dim), float("nan"), device=device)
    gate = qkv[:, : 3 * 2 * dim].view(5, 3, 2, dim)[:, :, 1]
    expected = merge_and_gate_naive((whole[0].cpu(), None), None, gate)
    merge_and_gate(*parts, qkv.to(device), out)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
    if dim == 128:
        fp8 = nan_rows(5, 3 * dim, device)
        merge_and_gate(*parts, qkv.to(device), fp8)
        is_quantised(fp8, out)
    if two_parts:
        on_cpu = [(out.cpu(), log.cpu()) for out, log in parts]  # type: ignore[misc]
        torch.testing.assert_close(merge_and_gate_naive(*on_cpu, gate), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 8])
def test_fp8_products(rows: int, device: str) -> None:
    """Against fp64 on the quantised operands: bf16 output is all that is lost; padding rows are ignored."""
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no block-scaled FP8 product before sm_90")
    values = torch.randint(0, 0x7F, (256, 512), dtype=torch.uint8, device=device)
    scale = torch.rand(2, 4, device=device) + 0.5
    packed = pack_fp8([(values.view(torch.float8_e4m3fn), scale)])
    assert fits(packed)
    assert not fits(pack_fp8([(values[:, :384].contiguous().view(torch.float8_e4m3fn), scale[:, :3])]))
    x = torch.randn(rows, 512, device=device).to(torch.bfloat16)
    quantised = quantise_rows(x)
    quantised.scale[rows:] = float("nan")
    product = fp8_linear(quantised, packed, torch.empty(256 * 512, dtype=torch.uint8, device=device), torch.bfloat16)
    exact = quantised.values.double() * quantised.scale.double().repeat_interleave(128, 1)
    assert relative_error(product, exact[:rows] @ unpack(packed).double().t()) < 3e-3
    if device == "cuda":
        assert relative_error(product, x.double() @ unpack(packed).double().t()) < 5e-2
    assert torch.equal(product, fp8_product(quantised, values.view(torch.float8_e4m3fn), scale, torch.bfloat16)[:rows])
