"""The screened head against the whole head: the same choice whatever the weights, ties and bad values included."""

import pytest
import torch
from kernarc.decoder.cuda.kernels.packing import quantise, unpack
from kernarc.decoder.cuda.kernels.products import CudaProducts, PlainProducts, Products
from kernarc.decoder.cuda.kernels.screened_head import (
    HeadScratch,
    ScreenedHead,
    error_bound,
    screened_argmax,
    screened_argmax_naive,
)


def build(rows: torch.Tensor) -> tuple[ScreenedHead, HeadScratch, Products]:
    """The head, scratch full of NaN, and the products of the device that rows is on."""
    head = ScreenedHead.build(rows, name="lm_head.weight")
    scratch = HeadScratch(len(rows), rows.device)
    for buffer in (scratch.logits, scratch.low, scratch.best):
        buffer.fill_(float("nan"))
    scratch.token.fill_(-1)
    is_card = rows.device.type == "cuda"
    return head, scratch, CudaProducts([head.screen], rows.device) if is_card else PlainProducts()


def choose(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The screened choice of every row of hidden."""
    head, scratch, products = build(rows)
    out = torch.full((len(hidden),), -1, device=rows.device)
    screened_argmax(hidden, head, scratch, products, out)
    return out


@pytest.mark.parametrize(("vocab", "width"), [(1040, 40), (2048, 256), (16, 8), (3072, 136)])
def test_it_chooses_what_the_whole_head_chooses(vocab: int, width: int, device: str) -> None:
    torch.manual_seed(vocab)
    rows = torch.randn(vocab, width, device=device).bfloat16()
    hidden = torch.randn(5, width, device=device).half()
    assert torch.equal(choose(hidden, rows), screened_argmax_naive(hidden, rows))


def test_flat_logits_leave_every_row_to_the_exact_pass(device: str) -> None:
    torch.manual_seed(1)
    rows = (torch.randn(1, 64) + torch.randn(48, 64) / 256).bfloat16().to(device)  # closer together than int8 can tell
    hidden = torch.randn(3, 64, device=device).half()
    assert torch.equal(choose(hidden, rows), screened_argmax_naive(hidden, rows))


def test_the_lowest_id_wins_a_tie_across_and_within_blocks(device: str) -> None:
    rows = torch.zeros(2064, 16).bfloat16()
    rows[[7, 9, 1030, 2050]] = 1.0
    assert choose(torch.ones(2, 16).half().to(device), rows.to(device)).tolist() == [7, 7]


def test_nan_gives_an_id_that_exists(device: str) -> None:
    rows = torch.full((32, 16), 1.0).bfloat16().to(device)
    assert choose(torch.full((1, 16), float("nan")).half().to(device), rows).tolist() == [0]


@pytest.mark.parametrize("spread", [1.0, 1e-3, 300.0])
def test_the_bound_holds_for_every_token(spread: float) -> None:
    torch.manual_seed(2)
    rows = (torch.randn(512, 256) * torch.rand(512, 1) * spread).bfloat16()
    values, scale = quantise(rows, torch.int8)
    hidden = torch.randn(8, 256).half()
    head = ScreenedHead.build(rows, name="lm_head.weight")
    exact, screened = hidden.double() @ rows.double().T, hidden.double() @ unpack(head.screen).double().T
    bound = error_bound(rows, values, scale) * hidden.float().norm(dim=1, keepdim=True)
    assert bool(((exact - screened).abs() <= bound).all())
    assert bound.max() < 0.02 * (rows.float().norm(dim=1) * hidden.float().norm(dim=1, keepdim=True)).max()
