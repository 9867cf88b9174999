"""Prefill kernels against their twins: chunked delta rule, weights unpacked, SwiGLU and the gated norm."""

import pytest
import torch
from kernarc.decoder.kernels.gdn_prefill import gdn_prefill
from kernarc.decoder.kernels.gdn_prepare import conv_naive
from kernarc.decoder.kernels.gdn_verify import delta_rule_naive, gated_norm_naive
from kernarc.decoder.kernels.packing import pack_bf16, pack_fp8, unpack
from kernarc.decoder.kernels.prefill import gated_norm, swiglu_into, unpack_into

HEADS, KEY_HEADS, DIM, TAPS = 2, 1, 16, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("lengths", [[1], [64], [70, 33], [5, 1, 3]], ids=str)
@pytest.mark.parametrize("repeated_keys", [False, True])
def test_pieces_equal_token_by_token(lengths: list[int], repeated_keys: bool, device: str) -> None:
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
        pieces.append(gdn_prefill(rows[piece], raw, conv, g[piece], beta[piece], state, start))
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
