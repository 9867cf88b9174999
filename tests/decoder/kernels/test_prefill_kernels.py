"""The chunked delta rule of prefill against its twin, and weights as they lie when packed."""

import pytest
import torch
from kernarc.decoder.config import ModelConfig
from kernarc.decoder.cuda_prefill import rows_from
from kernarc.decoder.kernels import gdn_prefill as gdn_prefill_module
from kernarc.decoder.kernels.gdn_prefill import gdn_prefill, is_right
from kernarc.decoder.kernels.gdn_prepare import conv_naive
from kernarc.decoder.kernels.gdn_verify import delta_rule_naive
from kernarc.decoder.kernels.packing import pack_bf16, pack_fp8, unpack
from kernarc.decoder.kernels.prefill_fp8 import fits
from kernarc.decoder.kernels.unpack import unpack_into
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
