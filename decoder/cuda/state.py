"""What a sequence leaves on the device, and the scratch of a step: allocated once, nothing grows afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checkpoint.config import FULL_ATTENTION, ModelConfig
from .kernels.gdn_prepare import GdnCache
from .kernels.launch import MAX_ROWS, RING
from .kernels.linear import Residual
from .kernels.rope_qk import rope_tables
from .kernels.screened_head import HeadScratch
from .kernels.verify_attention import segments_for

ACTIVATION = torch.float16  # between kernels of a step; the residual stream is fp32
SPARE_POSITIONS = 32  # rows past the window that a step may write and never commit


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """Keys and values of one layer, fp16 [kv heads, capacity, head dim]."""

    keys: torch.Tensor
    values: torch.Tensor


class SequenceState:
    """State of one sequence, everything by position (kernels/launch.py), so that a rejected row needs no undoing."""

    def __init__(self, config: ModelConfig, max_context: int, device: torch.device) -> None:
        capacity = max_context + SPARE_POSITIONS
        heads, key_dim, value_dim = (
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        self.positions = torch.zeros(8, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(RING.value, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(RING.value, config.hidden_size, dtype=ACTIVATION, device=device)
        self.layers: list[GdnCache | AttentionCache] = [
            _attention_cache(config, capacity, device)
            if kind == FULL_ATTENTION
            else GdnCache.allocate(heads, key_dim, value_dim, config.conv_dim, ACTIVATION, device)
            for kind in config.layer_types
        ]
        self.mtp = _attention_cache(config, capacity, device) if config.has_mtp else None
        self.rope = rope_tables(config.rotary_dim, config.rope_theta, capacity, device)

    def reset(self) -> None:
        """Back to an empty sequence; by-position contents need no clearing."""
        self.positions.zero_()
        for layer in self.layers:
            if isinstance(layer, GdnCache):
                layer.state.zero_()

    def set_positions(self, length: int, state_length: int, mtp_length: int) -> None:
        """Write the bookkeeping from the host; only prefill does."""
        self.positions[:3].copy_(torch.tensor([length, state_length, mtp_length], dtype=torch.int32))

    def rolling(self) -> list[torch.Tensor]:
        """Every tensor that a step overwrites in place; keys and values are only appended to."""
        tensors = [self.positions, self.tokens, self.hidden]
        for layer in self.layers:
            if isinstance(layer, GdnCache):
                tensors += [layer.state, layer.raw, layer.k, layer.v, layer.decay, layer.beta]
        return tensors


def _attention_cache(config: ModelConfig, capacity: int, device: torch.device) -> AttentionCache:
    shape = (config.num_key_value_heads, capacity, config.head_dim)
    return AttentionCache(*(torch.zeros(shape, dtype=ACTIVATION, device=device) for _ in range(2)))


class Scratch:
    """Buffers of one step, cut to the rows it has; contiguous whatever the row count."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_dim = config.head_dim
        self.qkv_width = 2 * (heads + config.num_key_value_heads) * head_dim
        self.qkvz_width = config.conv_dim + config.value_dim
        self.mixed_width = {True: heads * head_dim, False: config.value_dim}  # by "is full attention"
        self.inner_width = config.intermediate_size
        self.hidden_width = hidden
        self.query_shape = (heads, head_dim)
        self.segments = segments_for(_multiprocessors(device), config.num_key_value_heads)

        def empty(width: int, dtype: torch.dtype = ACTIVATION) -> torch.Tensor:
            return torch.empty(MAX_ROWS * width, dtype=dtype, device=device)

        self._stream = empty(hidden, torch.float32)
        self._x = empty(hidden)
        self._sumsq = empty(hidden // 32, torch.float32)
        self._projected = empty(max(self.qkv_width, self.qkvz_width))
        self._mixed = empty(max(self.mixed_width.values()))
        self._inner = empty(self.inner_width)
        self._hidden = empty(hidden)
        self._pair = empty(2 * hidden)
        self._query = empty(heads * head_dim)
        key_heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
        self.gdn_query = torch.empty((MAX_ROWS, key_heads, key_dim), dtype=torch.float32, device=device)
        self.gdn_output = torch.empty(
            (MAX_ROWS, config.linear_num_value_heads, config.linear_value_head_dim), dtype=torch.float32, device=device
        )
        self.partial = empty(self.segments * heads * head_dim, torch.float32)
        self.top = empty(self.segments * heads, torch.float32)
        self.total = empty(self.segments * heads, torch.float32)
        self.draft_hidden = torch.empty(1, hidden, dtype=ACTIVATION, device=device)
        self.head = HeadScratch(config.vocab_size, device)
        self.drafts = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self.targets = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self.result = torch.zeros(MAX_ROWS + 1, dtype=torch.int64, device=device)

    def residual(self, rows: int, next_norm: torch.Tensor) -> Residual:
        """The residual stream of R rows, prepared for the norm with weight `next_norm` [D]."""
        width = self.hidden_width
        stream, sumsq = _cut(self._stream, rows, width), _cut(self._sumsq, rows, width // 32)
        return Residual(stream, sumsq, _cut(self._x, rows, width), next_norm)

    def projected(self, rows: int, width: int) -> torch.Tensor:
        """[R, width] for the first projection of a mixer."""
        return _cut(self._projected, rows, width)

    def mixed(self, rows: int, *, attention: bool) -> torch.Tensor:
        """[R, ·] for what goes into the output projection."""
        return _cut(self._mixed, rows, self.mixed_width[attention])

    def inner(self, rows: int) -> torch.Tensor:
        """[R, I] between the two halves of the MLP."""
        return _cut(self._inner, rows, self.inner_width)

    def hidden(self, rows: int) -> torch.Tensor:
        """[R, D] after the final norm."""
        return _cut(self._hidden, rows, self.hidden_width)

    def pair(self, rows: int) -> torch.Tensor:
        """[R, 2D] for the MTP head."""
        return _cut(self._pair, rows, 2 * self.hidden_width)

    def query(self, rows: int) -> torch.Tensor:
        """[R, heads, head dim]."""
        heads, head_dim = self.query_shape
        return _cut(self._query, rows, heads * head_dim).view(rows, heads, head_dim)


def _cut(buffer: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    return buffer[: rows * width].view(rows, width)


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
