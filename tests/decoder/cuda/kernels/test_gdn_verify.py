"""Gated DeltaNet verify: every accept pattern leaves the state and the outputs of token-by-token decoding."""

from dataclasses import dataclass

import pytest
import torch
from kernarc.decoder.cuda.kernels.gdn_prepare import GdnCache, GdnWeights, conv_naive, gates_naive, gdn_prepare
from kernarc.decoder.cuda.kernels.gdn_verify import delta_rule_naive, gate_output, gated_norm_naive, gdn_recur
from kernarc.decoder.cuda.kernels.linear import X_SCALE
from kernarc.decoder.cuda.kernels.norm import rms_norm_naive

HALF = torch.float16
HEADS, KEY_HEADS, DIM, WIDTH, TAPS, EPS = 2, 1, 16, 96, 4, 1e-6
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM


@dataclass
class Layer:
    """One GDN layer's weights, and rows for a whole sequence."""

    rows: torch.Tensor  # [T, C + H·V]
    residual: torch.Tensor  # [T, D]
    weights: GdnWeights

    @classmethod
    def random(cls, length: int, device: str) -> "Layer":
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device)

        weights = GdnWeights(
            w_b=normal(HEADS, WIDTH) * 0.2,
            w_a=normal(HEADS, WIDTH) * 0.2,
            a_log=normal(HEADS) - 1,
            dt_bias=normal(HEADS),
            conv=normal(CHANNELS, TAPS) * 0.5,
            norm=normal(DIM).to(HALF),
        )
        return cls(
            normal(length, CHANNELS + HEADS * DIM).to(HALF), (normal(length, WIDTH) * 2).to(HALF).float(), weights
        )

    def first(self, length: int) -> "Layer":
        return Layer(self.rows[:length], self.residual[:length], self.weights)

    def sequential(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs [T, H·V], final state) by the twins."""
        rows, weights = self.rows, self.weights
        normed = rms_norm_naive(self.residual, torch.zeros_like(self.residual[0]), EPS)
        decay, beta = gates_naive(normed, weights.w_b, weights.w_a, weights.a_log, weights.dt_bias)
        mixed = conv_naive(rows.new_zeros(TAPS - 1, CHANNELS), rows[:, :CHANNELS], weights.conv).float()
        q, k, v = mixed.split([KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM], dim=1)
        q, k = (
            (x.view(-1, KEY_HEADS, DIM) * torch.rsqrt(x.view(-1, KEY_HEADS, DIM).square().sum(-1, True) + 1e-6))
            .repeat_interleave(HEADS // KEY_HEADS, 1)
            for x in (q, k)
        )  # fmt: skip
        state = torch.zeros(HEADS, DIM, DIM, device=rows.device)
        o, state = delta_rule_naive(q * DIM**-0.5, k, v.view(-1, HEADS, DIM), decay, beta, state)
        z = rows[:, CHANNELS:].view(-1, HEADS, DIM)
        return gated_norm_naive(o, z.float(), weights.norm, EPS).flatten(1), state


def drive(layer: Layer, pattern: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run steps of (rows verified, rows kept); rejected rows carry garbage. Returns (kept outputs, state)."""
    device = layer.rows.device
    cache = GdnCache.allocate(HEADS, DIM, DIM, CHANNELS, HALF, device)
    for ring in (cache.raw, cache.k, cache.v, cache.decay, cache.beta):
        ring.fill_(float("nan"))
    q = torch.full((16, KEY_HEADS, DIM), float("nan"), device=device)
    length = folded = 0
    kept_outputs = []
    for num_rows, kept in pattern:
        rows = torch.randn(num_rows, CHANNELS + HEADS * DIM, device=device).to(HALF)
        rows[:kept] = layer.rows[length : length + kept]
        residual = torch.randn(num_rows, WIDTH, device=device).to(HALF).float()
        residual[:kept] = layer.residual[length : length + kept]
        out = torch.full((num_rows, HEADS * DIM), float("nan"), dtype=HALF, device=device)
        place = torch.tensor([length, folded, 0, 0], dtype=torch.int32, device=device)
        x = (residual * X_SCALE).to(HALF)
        sumsq = residual.view(num_rows, -1, 32).square().sum(-1)
        gdn_prepare(rows, x, sumsq, layer.weights, cache, q, EPS, place)
        o = torch.full((num_rows, HEADS, DIM), float("nan"), device=device)
        gdn_recur(q, cache, place, o, columns=8)
        gate_output(o, rows[:, CHANNELS:], layer.weights.norm, EPS, out)
        kept_outputs.append(out[:kept])
        folded, length = length, length + kept
    return torch.cat(kept_outputs), cache.state


PATTERNS = {
    "one by one": [(1, 1)] * 5,
    "all of four": [(4, 4)] * 2,
    "every accept count": [(4, 1), (4, 2), (4, 3), (4, 4), (4, 1)],
    "changing widths": [(9, 9), (1, 1), (5, 2), (16, 11), (2, 1), (16, 16), (1, 1)],
    "past the ring": [(9, 7)] * 5,
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_any_accept_pattern_equals_sequential_decoding(pattern: list[tuple[int, int]], device: str) -> None:
    torch.manual_seed(len(pattern))
    layer = Layer.random(sum(kept for _, kept in pattern), device)
    expected, _ = layer.sequential()
    actual, _ = drive(layer, pattern)
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < 1e-3


def test_state_and_outputs_do_not_depend_on_grouping(device: str) -> None:
    torch.manual_seed(3)
    layer = Layer.random(5, device)
    by_ones, ones_state = drive(layer, [(1, 1)] * 5)
    grouped, grouped_state = drive(layer, [(9, 3), (4, 1), (2, 1)])
    assert torch.equal(by_ones, grouped)
    # both hold the first 4 tokens: the last step's rows are not folded in yet
    assert torch.equal(ones_state, grouped_state)


def test_state_is_the_recurrence_of_the_committed_tokens(device: str) -> None:
    torch.manual_seed(4)
    layer = Layer.random(10, device)
    _, state = drive(layer, [(4, 4), (4, 3), (4, 2), (4, 1)])
    torch.testing.assert_close(state, layer.first(9).sequential()[1], rtol=1e-5, atol=1e-6)
