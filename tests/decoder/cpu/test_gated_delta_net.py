"""The chunked delta rule against the recurrence written out token by token in fp64."""

from __future__ import annotations

import pytest
import torch
from kernarc.decoder.cpu.gated_delta_net import delta_rule

HEADS, KEY_DIM, VALUE_DIM = 3, 16, 24
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_inputs(rows: int, seed: int, forget: float) -> Inputs:
    """(q‖k, v, g, beta, S) in fp64; g ≈ −forget a row."""
    torch.manual_seed(seed)
    qk = torch.nn.functional.normalize(torch.randn(HEADS, 2, rows, KEY_DIM, dtype=torch.float64), dim=-1)
    v = torch.randn(HEADS, rows, VALUE_DIM, dtype=torch.float64)
    g = -forget * torch.rand(HEADS, rows, 1, dtype=torch.float64)
    beta = torch.rand(HEADS, rows, 1, dtype=torch.float64)
    state = torch.randn(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    return qk, v, g, beta, state


def token_loop(inputs: Inputs, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """MODEL section 1, a token at a time: outputs [heads, R, Dv] and the state after `count` rows."""
    qk, v, g, beta, state = inputs
    outputs, kept = [], state
    for t in range(v.shape[1]):
        q, k = qk[:, 0, t], qk[:, 1, t]
        state = state * g[:, t].exp()[..., None]
        delta = (v[:, t] - torch.einsum("hkv,hk->hv", state, k)) * beta[:, t]
        state = state + torch.einsum("hk,hv->hkv", k, delta)
        outputs.append(torch.einsum("hkv,hk->hv", state, q))
        if count is None or t + 1 == count:
            kept = state
    return torch.stack(outputs, 1), kept


def committed(inputs: Inputs, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs of all rows, state after committing `count` of them) in fp32."""
    qk, v, g, beta, start = (tensor.float() for tensor in inputs)
    state = start.clone()
    output, update = delta_rule(qk, v, g[:, None], beta, state)
    assert torch.equal(state, start), "a forward leaves the committed state alone"
    update.apply_(state, count)
    return output, state


@pytest.mark.parametrize("forget", [0.0, 0.1, 3.0, 60.0])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 17, 31, 64])
def test_one_chunk_equals_the_token_loop(rows: int, forget: float) -> None:
    inputs = random_inputs(rows, seed=rows, forget=forget)
    expected_output, expected_state = token_loop(inputs)
    output, state = committed(inputs, rows)
    bound = 1e-5 + 2 * rows * forget * 2**-24  # an fp32 running sum of g is off by |G|·2⁻²⁴
    torch.testing.assert_close(output.double(), expected_output, rtol=1e-5, atol=bound)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-5, atol=bound)


@pytest.mark.parametrize("count", range(1, 10))
def test_committing_some_rows_equals_reading_only_those(count: int) -> None:
    """vllm#39273: nothing of the rejected rows is left in S."""
    inputs = random_inputs(9, seed=count, forget=0.3)
    _, expected = token_loop(inputs, count)
    _, state = committed(inputs, count)
    torch.testing.assert_close(state.double(), expected, rtol=1e-5, atol=1e-5)


def test_equal_keys_are_the_hardest_system() -> None:
    """All keys equal and beta one: every row overwrites the one before, I + A is as far from diagonal as it gets."""
    qk, v, g, beta, state = random_inputs(64, seed=0, forget=0.0)
    qk[:] = qk[:, :, :1].clone()
    inputs = (qk, v, g, torch.ones_like(beta), state)
    expected_output, expected_state = token_loop(inputs)
    output, got = committed(inputs, 64)
    torch.testing.assert_close(output.double(), expected_output, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(got.double(), expected_state, rtol=1e-5, atol=2e-5)
