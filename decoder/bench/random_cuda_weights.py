"""A model of any shape straight into a card's memory, with random FP8 weights: to time it without a checkpoint.

Every packed byte is drawn at random, NaN codes cleared, under one constant scale a matrix, so that activations stay of
order one. Its output means nothing; its bytes, products and caches are those of a real model.
"""

from __future__ import annotations

import math

import torch

from ..checkpoint.config import FULL_ATTENTION, ModelConfig
from ..cuda.kernels.gdn_prepare import GdnWeights
from ..cuda.kernels.packing import BLOCK, TILE, UNIT_ROWS, PackedLinear
from ..cuda.kernels.packing import _scale_mode as scale_mode
from ..cuda.kernels.screened_head import ScreenedHead
from ..cuda.weights import AttentionMixer, CudaWeights, GdnMixer, LayerWeights, MtpWeights

E4M3_STD = 130.0  # of uniformly drawn codes without NaN; only the order matters


class RandomWeights:
    """Makes the parts of a CudaWeights on one device."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        self.config, self.device = config, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def model(self, *, draft_rows: int | None = None) -> CudaWeights:
        """A whole model; the draft head has `draft_rows` rows, all of them unless given."""
        config = self.config
        vocab, hidden = config.vocab_size, config.hidden_size
        embedding = torch.randn(vocab, hidden, generator=self.generator, device=self.device, dtype=torch.bfloat16)
        layers = [self.layer(kind == FULL_ATTENTION) for kind in config.layer_types]
        mtp = MtpWeights(
            self.vector(hidden),
            self.vector(hidden),
            self.fp8(hidden, 2 * hidden),
            self.layer(True),
            self.vector(hidden),
        )
        ids = None if draft_rows is None else torch.arange(draft_rows, device=self.device)
        draft_head = self.fp8(draft_rows or vocab, hidden)
        return CudaWeights(embedding, layers, self.vector(hidden), self.head(vocab, hidden), draft_head, mtp, ids)

    def layer(self, is_attention: bool) -> LayerWeights:
        """One decoder layer."""
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        mixer = self._attention() if is_attention else self._gdn()
        gate_up = self.fp8(2 * inner, hidden, interleave=True)
        return LayerWeights(self.vector(hidden), mixer, self.vector(hidden), gate_up, self.fp8(hidden, inner))

    def _attention(self) -> AttentionMixer:
        config = self.config
        heads, dim = config.num_attention_heads, config.head_dim
        qkv = self.fp8(2 * (heads + config.num_key_value_heads) * dim, config.hidden_size)
        return AttentionMixer(qkv, self.fp8(config.hidden_size, heads * dim), self.vector(dim), self.vector(dim))

    def _gdn(self) -> GdnMixer:
        config = self.config
        heads, hidden, channels = config.linear_num_value_heads, config.hidden_size, config.conv_dim
        small = GdnWeights(
            self.dense(heads, hidden),
            self.dense(heads, hidden),
            torch.linspace(-4.0, 2.5, heads, device=self.device),
            torch.full((heads,), -4.0, device=self.device),
            torch.randn(channels, config.linear_conv_kernel_dim, generator=self.generator, device=self.device) * 0.5,
            torch.ones(config.linear_value_head_dim, dtype=torch.bfloat16, device=self.device),
        )
        return GdnMixer(self.fp8(channels + config.value_dim, hidden), self.fp8(hidden, config.value_dim), small)

    def vector(self, size: int) -> torch.Tensor:
        """A norm's weight: 1 + w = 1."""
        return torch.zeros(size, dtype=torch.bfloat16, device=self.device)

    def dense(self, rows: int, columns: int) -> torch.Tensor:
        """bf16 [rows, columns] of standard deviation 1/√columns."""
        values = torch.randn(rows, columns, generator=self.generator, device=self.device)
        return (values / math.sqrt(columns)).bfloat16()

    def fp8(self, n: int, k: int, *, interleave: bool = False) -> PackedLinear:
        """Packed e4m3 weights [n, k] as pack_fp8 would have left them, one 128×128 block under one scale."""
        tiles, chunks = -(-n // TILE), -(-k // BLOCK)
        weights = torch.randint(
            0, 256, (tiles * chunks * TILE * BLOCK,), dtype=torch.uint8, generator=self.generator, device=self.device
        )
        weights[(weights & 0x7F) == 0x7F] = 0
        step, parts = (UNIT_ROWS // 2, 2) if interleave else (UNIT_ROWS, 1)
        blocks = -(-(n // parts) // BLOCK)
        of_unit = torch.arange(n // parts // step, dtype=torch.int32, device=self.device) * step // BLOCK
        halves = torch.stack((of_unit, of_unit + (parts - 1) * blocks), dim=1)
        padding = tiles * TILE // UNIT_ROWS - len(halves)
        halves = torch.cat((halves, halves[-1:].expand(padding, 2))).view(-1, TILE // UNIT_ROWS, 2).contiguous()
        scales = torch.full((parts * blocks, chunks), k**-0.5 / E4M3_STD, device=self.device)
        return PackedLinear(weights, scales, halves, n, k, scale_mode(halves), interleave)

    def head(self, vocab: int, hidden: int) -> ScreenedHead:
        """A vocabulary head, bf16 rows and their screen."""
        rows = torch.empty(vocab, hidden, dtype=torch.bfloat16, device=self.device)
        rows.normal_(0, hidden**-0.5, generator=self.generator)
        return ScreenedHead.build(rows, name="lm_head.weight")
