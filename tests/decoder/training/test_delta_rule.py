"""The chunked delta rule against the recurrence that defines it, token by token, in float64."""

import pytest
import torch
from kernarc.decoder.training.delta_rule import UnitLowerInverse, chunk_outputs, chunk_terms, scan_chunks
from torch import Tensor


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequences: int) -> Tensor:
    """MODEL.md's definition; inputs and output flat, [chunks, heads, 64, …]."""

    def in_time(x: Tensor) -> Tensor:  # [sequences, heads, time, ...]
        return x.unflatten(0, (sequences, -1)).transpose(1, 2).flatten(2, 3)

    q, k, v, g, beta = map(in_time, (q, k, v, g, beta))
    state = torch.zeros(sequences, q.shape[1], q.shape[-1], v.shape[-1], dtype=q.dtype)
    outputs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp()[..., None, None]
        delta = (v[:, :, t] - torch.einsum("shkv,shk->shv", state, k[:, :, t])) * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * delta[:, :, None]
        outputs.append(torch.einsum("shkv,shk->shv", state, q[:, :, t]))
    return torch.stack(outputs, 2).unflatten(2, (-1, 64)).transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("sequences", [1, 3], ids=["one-sequence", "three-sequences"])
def test_outputs_and_gradients_equal_the_recurrence(sequences: int) -> None:
    generator = torch.Generator().manual_seed(sequences)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    k = torch.nn.functional.normalize(random(6, 2, 64, 16), dim=-1)
    k[:, :, 10:40] = k[:, :, 9:10]  # equal keys with beta near one: where powers of L would blow up
    inputs = [random(6, 2, 64, 16), k, random(6, 2, 64, 24), -0.1 * random(6, 2, 64).abs(), random(6, 2, 64).sigmoid()]
    for tensor in inputs:
        tensor.requires_grad_()
    expected = recurrence(*inputs, sequences)
    terms = chunk_terms(*inputs)
    states, values = scan_chunks(terms, sequences)
    found = chunk_outputs(terms.queries, terms.attention, states, values)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    weights = random(*expected.shape)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_inverse_of_unit_lower_triangular_matrices() -> None:
    lower = torch.ones(2, 64, 64, dtype=torch.float64).tril(-1)
    inverse = UnitLowerInverse.apply(lower)
    identity = torch.eye(64, dtype=torch.float64).expand(2, 64, 64)
    torch.testing.assert_close(inverse @ (identity + lower), identity, rtol=0, atol=1e-12)
