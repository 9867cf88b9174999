"""Weights of a prompt's products as they lie when packed."""

import torch
from kernarc.decoder.bench.random_cuda_weights import RandomWeights
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.checkpoint.shapes import read_shape
from kernarc.decoder.cuda.kernels.packing import pack_bf16, pack_fp8, unpack
from kernarc.decoder.cuda.kernels.prefill_fp8 import fits
from kernarc.decoder.cuda.kernels.unpack import unpack_into
from kernarc.decoder.cuda.prefill import rows_from


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
