"""The fused Gated DeltaNet kernel and its twin: any accept pattern gives what token-by-token decoding gives.

On a card the kernel itself runs; without one its source runs in the emulator (emulator.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import pytest
import torch
from kernarc.decoder.cuda.kernels.gdn import SOURCE, arguments_of, definitions, gdn_step, gdn_step_naive
from kernarc.decoder.cuda.kernels.gdn_prepare import GdnCache, GdnWeights, conv_naive, gates_naive
from kernarc.decoder.cuda.kernels.gdn_verify import delta_rule_naive, gated_norm_naive
from kernarc.decoder.cuda.kernels.linear import X_SCALE
from kernarc.decoder.cuda.kernels.norm import rms_norm_naive
from kernarc.decoder.cuda.kernels.nvrtc import compile_cubin

from .emulator import COMPILER, emulate
from .errors import relative_error

HALF, EPS, TAPS = torch.float16, 1e-6, 4
Step = Callable[..., None]


@dataclass
class Layer:
    """One GDN layer's weights, and rows for a whole sequence."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    rows: torch.Tensor  # [T, C + H·V]
    residual: torch.Tensor  # [T, D]
    weights: GdnWeights

    @classmethod
    def random(
        cls, length: int, device: str, heads: int = 2, key_heads: int = 1, key_dim: int = 16, value_dim: int = 16,
        width: int = 96,
    ) -> "Layer":  # fmt: skip
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device)

        channels = 2 * key_heads * key_dim + heads * value_dim
        weights = GdnWeights(
            w_b=(normal(heads, width) * 0.2).bfloat16(),
            w_a=(normal(heads, width) * 0.2).bfloat16(),
            a_log=normal(heads) - 1,
            dt_bias=normal(heads),
            conv=normal(channels, TAPS) * 0.5,
            norm=normal(value_dim).bfloat16(),
        )
        rows = normal(length, channels + heads * value_dim).to(HALF)
        residual = (normal(length, width) * 2).to(HALF).float()
        return cls(heads, key_heads, key_dim, value_dim, rows, residual, weights)

    @property
    def channels(self) -> int:
        return self.weights.conv.shape[0]

    def cache(self) -> GdnCache:
        """Empty; rings hold NaN."""
        cache = GdnCache.allocate(
            self.heads, self.key_dim, self.value_dim, self.channels, HALF, self.rows.device
        )  # fmt: skip
        for ring in (cache.raw, cache.k, cache.v, cache.decay, cache.beta):
            ring.fill_(float("nan"))
        return cache

    def sequential(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs [length, H·V], final state) of the first tokens, by the parts' twins, fp64 from the gates on."""
        rows, weights, group = self.rows[:length], self.weights, self.heads // self.key_heads
        normed = rms_norm_naive(self.residual[:length], torch.zeros_like(self.residual[0]), EPS)
        decay, beta = gates_naive(normed, weights.w_b, weights.w_a, weights.a_log, weights.dt_bias)
        mixed = conv_naive(rows.new_zeros(TAPS - 1, self.channels), rows[:, : self.channels], weights.conv).double()
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.split([keys, keys, self.heads * self.value_dim], dim=1)
        q, k = (part.reshape(length, self.key_heads, self.key_dim) for part in (q, k))
        q, k = ((part * torch.rsqrt(part.square().sum(-1, True) + 1e-6)).repeat_interleave(group, 1) for part in (q, k))
        state = torch.zeros(self.heads, self.key_dim, self.value_dim, dtype=torch.float64, device=rows.device)
        v = v.view(length, self.heads, self.value_dim)
        o, state = delta_rule_naive(q * self.key_dim**-0.5, k, v, decay.double(), beta.double(), state)
        z = rows[:, self.channels :].reshape(length, self.heads, self.value_dim)
        return gated_norm_naive(o, z.double(), weights.norm.double(), EPS).flatten(1), state


def drive(step: Step, layer: Layer, pattern: list[tuple[int, int]]) -> tuple[torch.Tensor, GdnCache]:
    """Run steps of (rows verified, rows kept); rejected rows carry garbage. Returns (kept outputs, cache)."""
    device = layer.rows.device
    cache = layer.cache()
    length = folded = 0
    kept_outputs = []
    for num_rows, kept in pattern:
        rows = torch.randn(num_rows, layer.rows.shape[1], device=device).to(HALF)
        rows[:kept] = layer.rows[length : length + kept]
        residual = torch.randn(num_rows, layer.residual.shape[1], device=device).to(HALF).float()
        residual[:kept] = layer.residual[length : length + kept]
        out = torch.full((num_rows, layer.heads * layer.value_dim), float("nan"), dtype=HALF, device=device)
        place = torch.tensor([length, folded, 0, 0], dtype=torch.int32, device=device)
        x = (residual * X_SCALE).to(HALF)
        sumsq = residual.view(num_rows, -1, 32).square().sum(-1)
        step(rows, x, sumsq, layer.weights, cache, EPS, place, out)
        kept_outputs.append(out[:kept])
        folded, length = length, length + kept
    return torch.cat(kept_outputs), cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where emulated kernels are compiled to."""
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(params=["twin", "kernel", "kernel with early gates"])
def step(request: pytest.FixtureRequest, folder: Path) -> Step:
    """The twin, or the kernel: on the card, or emulated with two CTAs a head."""
    if request.param == "twin":
        return gdn_step_naive
    is_early = request.param != "kernel"
    if torch.cuda.is_available():
        return partial(gdn_step, x_is_here=is_early)
    if COMPILER is None:
        pytest.skip("neither a GPU nor g++ here")

    def emulated(rows: torch.Tensor, x: torch.Tensor, sumsq: torch.Tensor, weights: GdnWeights, cache: GdnCache,
                 eps: float, positions: torch.Tensor, out: torch.Tensor) -> None:  # fmt: skip
        columns = cache.state.shape[2] // 2
        made = definitions(len(rows), rows.stride(0), x.shape[1], weights, cache, columns)
        made["GATES_EARLY"] = int(is_early)
        arguments = arguments_of(rows, x, sumsq, weights, cache, eps, positions, out)
        ctas = made["H"] * made["SPLIT"]
        emulate(SOURCE, "gdn", made, arguments, folder, grid=ctas, together=made["SPLIT"])

    return emulated


PATTERNS = {
    "one by one": [(1, 1)] * 5,
    "all of four": [(4, 4)] * 2,
    "every accept count": [(4, 1), (4, 2), (4, 3), (4, 4), (4, 1)],
    "changing widths": [(9, 9), (1, 1), (5, 2), (16, 11), (2, 1), (16, 16), (1, 1)],
    "past the ring": [(9, 7)] * 5,
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_any_accept_pattern_equals_sequential_decoding(step: Step, pattern: list[tuple[int, int]], device: str) -> None:
    torch.manual_seed(len(pattern))
    kept = sum(count for _, count in pattern)
    layer = Layer.random(kept, device)
    actual, cache = drive(step, layer, pattern)
    assert relative_error(actual, layer.sequential(kept)[0]) < 1e-3
    folded = kept - pattern[-1][1]  # the last step's rows are not in the state yet
    assert relative_error(cache.state, layer.sequential(folded)[1]) < 2e-4


@pytest.mark.parametrize(
    "shape",
    [(3, 1, 64, 32, 128), (4, 2, 32, 128, 256), (2, 2, 128, 64, 640)],
    ids=["three heads a key", "wide values", "wide keys"],
)
def test_other_head_layouts(step: Step, shape: tuple[int, int, int, int, int], device: str) -> None:
    torch.manual_seed(shape[2])
    layer = Layer.random(6, device, *shape)
    actual, cache = drive(step, layer, [(3, 2), (4, 4)])
    assert relative_error(actual, layer.sequential(6)[0]) < 1e-3
    assert relative_error(cache.state, layer.sequential(2)[1]) < 2e-4


@pytest.mark.parametrize("shape", [(2, 1, 16, 16, 96), (1, 1, 128, 128, 640)], ids=["small", "as in the 27B"])
def test_state_rings_and_outputs_do_not_depend_on_grouping(
    step: Step, shape: tuple[int, int, int, int, int], device: str
) -> None:
    torch.manual_seed(3)
    layer = Layer.random(5, device, *shape)
    by_ones, ones = drive(step, layer, [(1, 1)] * 5)
    grouped, groups = drive(step, layer, [(9, 3), (4, 1), (2, 1)])
    assert torch.equal(by_ones, grouped)
    for field in fields(GdnCache):  # the state holds the first 4 tokens, the rings all 5
        one, other = getattr(ones, field.name), getattr(groups, field.name)
        assert torch.equal(one, other) if field.name == "state" else torch.equal(one[:5], other[:5])


@pytest.mark.parametrize(("arch", "columns"), [(80, 128), (90, 64)])
@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_kernel_compiles_for_both_cards_without_one(arch: int, columns: int, num_rows: int) -> None:
    channels = 10240
    cache = GdnCache.allocate(48, 128, 128, channels, HALF, torch.device("meta"))
    empty = torch.empty(channels, TAPS, device="meta")
    made = definitions(num_rows, 16384, 5120, GdnWeights(*[empty] * 6), cache, columns)
    for early in (0, 1):
        assert compile_cubin(SOURCE.read_text(), arch, made | {"GATES_EARLY": early})
