"""Prefill kernels against their twins: chunked delta rule, weights unpacked, norms, merged attention, FP8."""

import dataclasses

import pytest
import torch
from kernarc.decoder.config import ModelConfig
from kernarc.decoder.cuda_prefill import rows_from
from kernarc.decoder.kernels import gdn_prefill as gdn_prefill_module
from kernarc.decoder.kernels.gdn_prefill import gdn_prefill, is_right
from kernarc.decoder.kernels.gdn_prepare import conv_naive
from kernarc.decoder.kernels.gdn_verify import delta_rule_naive, gated_norm_naive
from kernarc.decoder.kernels.norm import rms_norm_naive
from kernarc.decoder.kernels.packing import pack_bf16, pack_fp8, unpack
from kernarc.decoder.kernels.prefill import (
    add_norm,
    gated_norm,
    merge_and_gate,
    merge_and_gate_naive,
    swiglu_into,
    unpack_into,
)
from kernarc.decoder.kernels.prefill_fp8 import fits, fp8_linear, fp8_product, quantise_rows, quantise_rows_naive
from kernarc.decoder.random_cuda_weights import RandomWeights
from kernarc.decoder.shapes import read_shape

HEADS, KEY_HEADS, DIM, TAPS = 2, 1, 16, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("lengths", [[1], [64], [70, 33], [5, 1, 3]], ids=str)
@pytest.mark.parametrize("repeated_keys", [False, True])
def test_pieces_equal_token_by_token(lengths: list[int], repeated_keys: bool, by_blocks: bool, device: str) -> None:
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
        pieces.append(gdn_prefill(rows[piece], raw, conv, g[piece], beta[piece], state, start, by_blocks=by_blocks))
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
    assert relative(torch.cat(pieces), expected) < 3e-3
    assert relative(state, final) < 3e-3


def test_a_wrong_delta_rule_is_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*, by_blocks: bool) -> bool:
        return is_right((HEADS, DIM, DIM), CHANNELS, TAPS, torch.device(device), by_blocks=by_blocks)

    assert check(by_blocks=False)
    if device == "cpu":
        assert check(by_blocks=True)
    run = gdn_prefill

    def nan_in_one_head(*args: object, **form: object) -> torch.Tensor:
        out = run(*args, **form)  # type: ignore[arg-type]
        out[0, 1] = float("nan")
        return out

    monkeypatch.setattr(gdn_prefill_module, "gdn_prefill", nan_in_one_head)
    assert not check(by_blocks=False)


@pytest.mark.parametrize(("rows", "columns"), [(144, 264), (128, 128), (32, 40)])
def test_unpacking_gives_back_the_weights(rows: int, columns: int, device: str) -> None:
    values = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    values[(values & 0x7F) == 0x7F] = 0x3F  # NaN codes are refused by the packing
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    parts = [(part.view(torch.float8_e4m3fn), scale) for part in (values, values.flip(0))]
    dense = torch.randn(rows, columns).to(torch.bfloat16)
    for packed in (pack_fp8(parts[:1]), pack_fp8(parts), pack_fp8(parts, interleave=True), pack_bf16(dense)):
        on_device = type(packed)(
            *(field.to(device) if isinstance(field, torch.Tensor) else field for field in _fields(packed))
        )
        out = torch.full((packed.n * packed.k + 8,), float("nan"), device=device)
        assert torch.equal(unpack_into(on_device, out).cpu(), unpack(packed))
        assert out[packed.n * packed.k :].isnan().all()
        if packed.is_fp8:  # as bytes, without scales
            raw = torch.full((packed.n * packed.k + 8,), 0x7F, dtype=torch.uint8, device=device)
            unscaled = unpack(dataclasses.replace(packed, scales=torch.ones_like(packed.scales)))
            assert torch.equal(unpack_into(on_device, raw).view(torch.float8_e4m3fn).float().cpu(), unscaled)
            assert (raw[packed.n * packed.k :] == 0x7F).all()


def test_the_last_rows_alone_are_the_last_rows(device: str) -> None:
    values = torch.randint(0, 0x7F, (384, 256), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, device=device) + 0.5
    for parts in ([(values, scale)], [(values[:256], scale[:2]), (values[256:], scale[2:])]):
        packed = pack_fp8(parts)
        cut = rows_from(packed, 256)
        assert cut is not None
        assert fits(packed) == fits(cut) == (packed.k % 512 == 0)
        assert torch.equal(unpack(cut), unpack(packed)[256:])
        assert torch.equal(unpack_into(cut, torch.empty(128 * 256, device=device)), unpack(packed)[256:])
    dense = torch.randn(384, 64, device=device).to(torch.bfloat16)
    cut = rows_from(pack_bf16(dense), 128)
    assert cut is not None
    assert torch.equal(unpack(cut), dense[128:].float())
    assert rows_from(packed, 64) is None


def _fields(packed: object) -> list[object]:
    return [getattr(packed, name) for name in packed.__dataclass_fields__]  # type: ignore[attr-defined]


def test_swiglu_and_gated_norm_equal_their_twins(device: str) -> None:
    gate_up = torch.randn(5, 2 * 1100, device=device)
    out = torch.full((5, 1100), float("nan"), device=device)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(swiglu_into(gate_up, out), torch.nn.functional.silu(gate) * up)
    o = torch.randn(5, 3, 16, device=device).to(torch.float16)
    wide = torch.randn(5, 100, device=device)
    weight = torch.randn(16, device=device)
    expected = gated_norm_naive(o.float(), wide[:, 52:].view(5, 3, 16), weight, 1e-6).flatten(1)
    torch.testing.assert_close(gated_norm(o, wide[:, 52:], weight, 1e-6), expected)


@pytest.mark.parametrize("width", [96, 160])
def test_residual_addition_and_norm(width: int, device: str) -> None:
    stream, y = torch.randn(5, width, device=device), torch.randn(5, width, device=device)
    weight = torch.randn(width, device=device)
    expected = stream + y
    normed = add_norm(stream, y, weight, 1e-6)
    assert torch.equal(stream, expected)
    torch.testing.assert_close(normed, rms_norm_naive(expected, weight, 1e-6))


@pytest.mark.parametrize("two_parts", [False, True])
def test_merged_attention_is_attention_over_all_keys(two_parts: bool, device: str) -> None:
    """Three heads of 16, rows that see 40 keys, split at key 24; the outputs lie as [T, H, D] in memory."""
    q, k, v = torch.randn(3, 5, 16), torch.randn(3, 40, 16), torch.randn(3, 40, 16)
    qkv = torch.randn(5, 3 * 32 + 7)

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k[:, keys].mT
        out = (scores.softmax(-1) @ v[:, keys]).transpose(0, 1).contiguous().to(device).transpose(0, 1)
        return out, scores.logsumexp(-1).to(device)

    whole = part(slice(40))
    parts = (part(slice(24)), part(slice(24, 40))) if two_parts else ((whole[0], None), None)
    merged = merge_and_gate(*parts, qkv.to(device)).cpu()
    gate = qkv[:, : 3 * 32].view(5, 3, 2, 16)[:, :, 1]
    expected = merge_and_gate_naive((whole[0].cpu(), None), None, gate)
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    if two_parts:
        on_cpu = [(out.cpu(), log.cpu()) for out, log in parts]  # type: ignore[misc]
        torch.testing.assert_close(merge_and_gate_naive(*on_cpu, gate), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_rows_quantise_as_their_twin(rows: int, device: str) -> None:
    x = torch.randn(rows, 640, device=device) * torch.logspace(-6, 3, 640, device=device)
    x[0, :128] = 0
    x = x.to(torch.bfloat16).float()
    quantised, twin = quantise_rows(x), quantise_rows_naive(x)
    assert quantised.values.shape[0] % 4 == 0
    assert quantised.scale.stride(0) == 1
    torch.testing.assert_close(quantised.scale[:rows], twin.scale)
    assert not quantised.values[rows:].float().any()
    restored = quantised.values[:rows].float().view(rows, -1, 128) * quantised.scale[:rows, :, None]
    rounding = 1 / 16 if device == "cuda" else 1 / 2  # the interpreter loses the carry of a mantissa that rounds up
    bound = x.view(rows, -1, 128).abs() * rounding + quantised.scale[:rows, :, None] * 2**-9  # subnormals
    assert ((restored - x.view(rows, -1, 128)).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("rows", [3, 8])
def test_fp8_products(rows: int, device: str) -> None:
    """Against fp64 on the quantised operands: bf16 output is all that is lost."""
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no block-scaled FP8 product before sm_90")
    values = torch.randint(0, 0x7F, (256, 512), dtype=torch.uint8, device=device)
    scale = torch.rand(2, 4, device=device) + 0.5
    packed = pack_fp8([(values.view(torch.float8_e4m3fn), scale)])
    assert fits(packed)
    assert not fits(pack_fp8([(values[:, :384].contiguous().view(torch.float8_e4m3fn), scale[:, :3])]))
    x = torch.randn(rows, 512, device=device).to(torch.bfloat16)
    product = fp8_linear(x, packed, torch.empty(256 * 512, dtype=torch.uint8, device=device))
    quantised = quantise_rows(x)
    exact = quantised.values.double() * quantised.scale.double().repeat_interleave(128, 1)
    assert relative(product, exact[:rows] @ unpack(packed).double().t()) < 3e-3
    if device == "cuda":
        assert relative(product, x.double() @ unpack(packed).double().t()) < 5e-2
    assert torch.equal(product, fp8_product(quantised, values.view(torch.float8_e4m3fn), scale, torch.bfloat16)[:rows])


def test_random_weights_lie_as_packed_ones(device: str) -> None:
    make = RandomWeights(ModelConfig.from_dict(read_shape("tiny")), torch.device(device))
    for n, k, interleave in ((384, 256, False), (144, 264, False), (512, 128, True), (192, 128, True)):
        made = make.fp8(n, k, interleave=interleave)
        values = torch.zeros(n // 2 if interleave else n, k, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scale = torch.ones(-(-len(values) // 128), -(-k // 128), device=device)
        packed = pack_fp8([(values, scale)] * (1 + interleave), interleave=interleave)
        for name in ("weights", "scales", "scale_rows"):
            assert getattr(made, name).shape == getattr(packed, name).shape, name
        assert torch.equal(made.scale_rows, packed.scale_rows)  # type: ignore[arg-type]
        assert (made.n, made.k, made.scale_mode) == (packed.n, packed.k, packed.scale_mode)
        weights = unpack(made)
        assert weights.isfinite().all()
        assert 0.5 < float(weights.std()) * k**0.5 < 2
    head = make.head(144, 264)
    assert 0.5 < float(head.rows.float().std()) * 264**0.5 < 2
    assert unpack(head.screen).shape == head.rows.shape
