"""Norms, embeddings and acceptance against their plain twins."""

import pytest
import torch
from kernarc.decoder.cuda.kernels.accept import accept, accept_naive
from kernarc.decoder.cuda.kernels.embed import embed_rows, mtp_input, mtp_input_naive
from kernarc.decoder.cuda.kernels.linear import X_SCALE, Residual
from kernarc.decoder.cuda.kernels.norm import rms_norm, rms_norm_naive

ROW_COUNTS = [1, 2, 3, 4, 5, 8, 9, 16]
HALF = torch.float16
EPS = 1e-6
SIZES = ((192, HALF), (96, torch.float32))  # the MTP input and the residual behind its fc


def positions(length: int, state: int, mtp: int, device: str) -> torch.Tensor:
    return torch.tensor([length, state, mtp, 0], dtype=torch.int32, device=device)


def close(actual: torch.Tensor, expected: torch.Tensor, bound: float = 1e-3) -> None:
    """Relative error in norm; fp16 rounding of single elements stays far below the bound, NaN never passes."""
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < bound, f"relative error {error:.2e}"


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("width", [160, 5120])
def test_rms_norm_equals_its_twin(rows: int, width: int, device: str) -> None:
    x = torch.randn(rows, width, dtype=HALF, device=device) * 3
    weight = torch.randn(width, dtype=HALF, device=device) * 0.1
    out = torch.full_like(x, float("nan"))
    rms_norm(x, weight, EPS, out)
    close(out, rms_norm_naive(x, weight, EPS))


def test_rms_norm_writes_its_ring_by_position(device: str) -> None:
    x = torch.randn(4, 96, dtype=HALF, device=device)
    weight = torch.zeros(96, dtype=HALF, device=device)
    out, ring = torch.empty_like(x), torch.full((32, 96), float("nan"), dtype=HALF, device=device)
    rms_norm(x, weight, EPS, out, ring=ring, positions=positions(30, 0, 0, device))
    assert torch.equal(ring[[30, 31, 0, 1]], out)
    assert ring[2:30].isnan().all()


def test_rms_norm_picks_the_newest_pending_row(device: str) -> None:
    x = torch.randn(5, 64, dtype=HALF, device=device)
    weight = torch.randn(64, dtype=HALF, device=device)
    out = torch.full((1, 64), float("nan"), dtype=HALF, device=device)
    rms_norm(x, weight, EPS, out, positions=positions(10, 0, 7, device), last_pending=True)
    assert torch.equal(out, rms_norm_naive(x[2:3], weight, EPS))


@pytest.mark.parametrize("reduced", [False, True])
def test_embed_rows_reads_the_ring_and_takes_the_last_draft(reduced: bool, device: str) -> None:
    embedding = torch.randn(50, 96, dtype=HALF, device=device)
    tokens = torch.arange(32, device=device)
    nan = {"fill_value": float("nan"), "device": device}
    weight = torch.randn(96, dtype=HALF, device=device)
    residual = Residual(torch.full((4, 96), **nan), torch.full((4, 3), **nan), torch.full((4, 96), **nan), weight)
    last = torch.tensor([3 if reduced else 44], device=device)
    ids = torch.tensor([7, 9, 20, 44], device=device) if reduced else None
    embed_rows(tokens, positions(30, 0, 0, device), embedding, residual, last_draft=last, draft_ids=ids)
    expected = embedding[[30, 31, 0, 44]].float()
    assert torch.equal(residual.stream, expected)
    torch.testing.assert_close(residual.sumsq, expected.view(4, 3, 32).square().sum(-1))
    torch.testing.assert_close(residual.x, expected * (1 + weight.float()) * X_SCALE)
    assert tokens[1] == 44


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_mtp_input_reads_true_hidden_states(rows: int, device: str) -> None:
    embedding = torch.randn(50, 96, dtype=HALF, device=device)
    hidden = torch.randn(32, 96, dtype=HALF, device=device)
    norm_e, norm_h = (torch.randn(96, dtype=HALF, device=device) for _ in range(2))
    tokens = torch.arange(32, device=device)
    out, residual = (torch.full((rows, size), float("nan"), dtype=kind, device=device) for size, kind in SIZES)
    mtp_input(tokens, positions(35, 0, 28, device), embedding, hidden, norm_e, norm_h, EPS, out, residual)
    assert not residual.any()
    slots = torch.tensor([(28 + row) % 32 for row in range(rows)], device=device)
    close(out, mtp_input_naive(embedding[(slots + 1) % 32], hidden[slots], norm_e, norm_h, EPS))


@pytest.mark.parametrize("reduced", [False, True])
def test_mtp_recursion_embeds_the_draft_and_records_it(reduced: bool, device: str) -> None:
    embedding = torch.randn(50, 96, dtype=HALF, device=device)
    hidden = torch.randn(1, 96, dtype=HALF, device=device)
    norm_e, norm_h = (torch.randn(96, dtype=HALF, device=device) for _ in range(2))
    tokens = torch.zeros(32, dtype=torch.int64, device=device)
    out, residual = (torch.full((1, size), float("nan"), dtype=kind, device=device) for size, kind in SIZES)
    draft = torch.tensor([41], device=device)
    args = (tokens, positions(30, 0, 28, device), embedding, hidden, norm_e, norm_h, EPS, out, residual)
    if reduced:
        ids = torch.tensor([7, 41, 44], device=device)
        mtp_input(*args, draft=torch.tensor([1], device=device), draft_ids=ids, draft_index=2)
    else:
        mtp_input(*args, draft=draft, draft_index=2)
    close(out, mtp_input_naive(embedding[draft], hidden, norm_e, norm_h, EPS))
    assert tokens[0] == 41  # the second draft stands at 30 + 2


@pytest.mark.parametrize("num_drafts", range(9))
def test_accept_counts_only_the_agreeing_prefix(num_drafts: int, device: str) -> None:
    for wrong in range(num_drafts + 1):
        drafts = [7 + i for i in range(num_drafts)]
        targets = [7 + i for i in range(num_drafts + 1)]
        if wrong < num_drafts:
            targets[wrong] += 1
        tokens = torch.full((32,), -1, dtype=torch.int64, device=device)
        for i, draft in enumerate(drafts):
            tokens[(28 + 1 + i) % 32] = draft
        place = positions(28, 25, 26, device)
        out = torch.full((12,), -1, dtype=torch.int64, device=device)
        accept(torch.tensor(targets, device=device), tokens, place, out, num_drafts=num_drafts)
        accepted = accept_naive(drafts, targets)
        assert out[0] == accepted == wrong
        assert out[1 : num_drafts + 2].tolist() == targets
        assert place[:3].tolist() == [28 + wrong + 1, 28, 28 if num_drafts else 26]
        assert [int(tokens[(29 + i) % 32]) for i in range(wrong + 1)] == targets[: wrong + 1]
