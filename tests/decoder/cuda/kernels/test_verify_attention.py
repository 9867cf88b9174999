"""RoPE with the cache write, and split-KV attention, against their plain twins."""

import pytest
import torch
from kernarc.decoder.cuda.kernels.rope_qk import rope_naive, rope_qk, rope_tables
from kernarc.decoder.cuda.kernels.verify_attention import verify_attention, verify_attention_naive

HALF = torch.float16
EPS = 1e-6


def place(length: int, device: str) -> torch.Tensor:
    return torch.tensor([length, 0, 0, 0], dtype=torch.int32, device=device)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, base: int, qkv: torch.Tensor, segments: int
) -> torch.Tensor:
    rows, q_heads, head_dim = q.shape
    scratch = [
        torch.full((segments * rows * q_heads * size,), float("nan"), device=q.device) for size in (head_dim, 1, 1)
    ]
    out = torch.full((rows, q_heads * head_dim), float("nan"), dtype=HALF, device=q.device)
    verify_attention(q, keys, values, place(base, str(q.device)), qkv, *scratch, out, segments=segments)
    return out.view(rows, q_heads, head_dim)


def random_case(
    rows: int, base: int, q_heads: int, kv_heads: int, dim: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    capacity = base + rows + 7
    q = torch.randn(rows, q_heads, dim, device=device).to(HALF)
    keys, values = (torch.randn(kv_heads, capacity, dim, device=device).to(HALF) for _ in range(2))
    keys[:, base + rows :] = values[:, base + rows :] = float("nan")  # never to be read
    qkv = torch.randn(rows, (2 * q_heads + 2 * kv_heads) * dim, device=device).to(HALF)
    return q, keys, values, qkv


def gate_of(qkv: torch.Tensor, q_heads: int, dim: int) -> torch.Tensor:
    return qkv[:, : 2 * q_heads * dim].view(-1, q_heads, 2, dim)[:, :, 1]


@pytest.mark.parametrize("rows", [1, 4, 6, 16])
@pytest.mark.parametrize("base", [0, 63, 130])
def test_attention_equals_its_twin(rows: int, base: int, device: str) -> None:
    torch.manual_seed(rows * 1000 + base)
    q, keys, values, qkv = random_case(rows, base, 12, 2, 32, device)
    out = attend(q, keys, values, base, qkv, segments=3)
    expected = verify_attention_naive(q, keys, values, base, gate_of(qkv, 12, 32))
    assert (out.double() - expected.double()).norm() / expected.double().norm() < 2e-3


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(24, 4, 256), (4, 4, 16), (2, 1, 64)])
def test_attention_at_other_head_layouts(q_heads: int, kv_heads: int, dim: int, device: str) -> None:
    torch.manual_seed(dim)
    q, keys, values, qkv = random_case(3, 70, q_heads, kv_heads, dim, device)
    out = attend(q, keys, values, 70, qkv, segments=5)
    expected = verify_attention_naive(q, keys, values, 70, gate_of(qkv, q_heads, dim))
    assert (out.double() - expected.double()).norm() / expected.double().norm() < 2e-3


def test_a_row_is_the_same_alone_and_in_company(device: str) -> None:
    torch.manual_seed(5)
    q, keys, values, qkv = random_case(9, 150, 12, 2, 32, device)
    together = attend(q, keys, values, 150, qkv, segments=2)
    for row in range(9):
        alone = attend(q[row : row + 1], keys, values, 150 + row, qkv[row : row + 1], segments=2)
        if device == "cuda":
            assert torch.equal(alone[0], together[row])
        else:  # the interpreter multiplies by NumPy, which may add a row in another order where it lies elsewhere
            assert torch.allclose(alone[0], together[row], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_rope_turns_queries_and_fills_the_cache(rows: int, device: str) -> None:
    torch.manual_seed(rows)
    q_heads, kv_heads, dim, base = 6, 2, 64, 40
    qkv = torch.randn(rows, (2 * q_heads + 2 * kv_heads) * dim, device=device).to(HALF)
    norm_q, norm_k = (torch.randn(dim, device=device).to(HALF) * 0.1 for _ in range(2))
    table = rope_tables(16, 1e7, 80, device)
    q = torch.full((rows, q_heads, dim), float("nan"), dtype=HALF, device=device)
    keys, values = (torch.full((kv_heads, 80, dim), float("nan"), dtype=HALF, device=device) for _ in range(2))
    rope_qk(qkv, norm_q, norm_k, EPS, table, place(base - 2, device), q, keys, values, offset=2)
    heads = qkv[:, : 2 * q_heads * dim].view(rows, q_heads, 2, dim)
    k, v = qkv[:, 2 * q_heads * dim :].view(rows, 2, kv_heads, dim).unbind(1)
    turned = table[base : base + rows]
    torch.testing.assert_close(q, rope_naive(heads[:, :, 0], norm_q, EPS, turned), rtol=1e-2, atol=1e-2)
    written = slice(base, base + rows)
    expected = rope_naive(k, norm_k, EPS, turned).transpose(0, 1)
    torch.testing.assert_close(keys[:, written], expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(values[:, written], v.transpose(0, 1))
    assert keys[:, :base].isnan().all()
    assert keys[:, base + rows :].isnan().all()
