"""State memory that the C++ reads and writes: owned by PyTorch, in the layouts of attention.h and delta_rule.h."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..checkpoint.config import FULL_ATTENTION, ModelConfig
from .layout import LANES, round_up

KEY_BLOCK = 64  # positions whose keys lie together, transposed
SPARE = 1024  # positions allocated beyond what is needed


class NativeKeyValueCache:
    """Keys and values of one attention layer, fp32; grows now and then."""

    def __init__(self, config: ModelConfig, *, has_halves: bool = False) -> None:
        """has_halves: a copy in 16 bits as well, for drafts to read."""
        self.dim = config.head_dim
        heads = config.num_key_value_heads
        self.halves: tuple[torch.Tensor, torch.Tensor] | None = None
        self._has_halves = has_halves
        self.key_blocks = torch.empty(heads, 0, self.dim, KEY_BLOCK)  # [kv heads, T / 64, D, 64]
        self.value_rows = torch.empty(heads, 0, round_up(self.dim, LANES))  # [kv heads, T, D rounded up]

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.value_rows.shape[1]

    @property
    def keys(self) -> torch.Tensor:
        """[kv heads, T, D], a copy."""
        return self.key_blocks.transpose(2, 3).reshape(self.key_blocks.shape[0], -1, self.dim)

    @property
    def values(self) -> torch.Tensor:
        """[kv heads, T, D], a view."""
        return self.value_rows[:, :, : self.dim]

    def allocate(self, length: int, keep: int = 0) -> None:
        """Make room for `length` positions and some more; the first `keep` stay."""
        old_keys, old_values = self.key_blocks, self.value_rows
        blocks = round_up(length + SPARE, KEY_BLOCK) // KEY_BLOCK
        kept = -(-keep // KEY_BLOCK)
        self.key_blocks = old_keys.new_empty(old_keys.shape[0], blocks, self.dim, KEY_BLOCK)
        self.value_rows = old_values.new_empty(old_values.shape[0], blocks * KEY_BLOCK, old_values.shape[2])
        self.key_blocks[:, :kept] = old_keys[:, :kept]
        self.value_rows[:, :keep] = old_values[:, :keep]
        if self._has_halves:
            old = self.halves
            self.halves = (
                self.key_blocks.new_empty(self.key_blocks.shape, dtype=torch.float16),
                self.value_rows.new_empty(self.value_rows.shape, dtype=torch.float16),
            )
            if old is not None:
                self.halves[0][:, :kept] = old[0][:, :kept]
                self.halves[1][:, :keep] = old[1][:, :keep]

    def pointers(self) -> tuple[int, int]:
        """Addresses of keys and values."""
        return self.key_blocks.data_ptr(), self.value_rows.data_ptr()


class NativeDeltaState:
    """Committed state of one GDN layer."""

    def __init__(self, config: ModelConfig) -> None:
        heads, value_dim = config.linear_num_value_heads, config.linear_value_head_dim
        self._states = torch.zeros(heads, config.linear_key_head_dim, round_up(value_dim, LANES))
        self._inputs = torch.zeros(config.linear_conv_kernel_dim - 1, round_up(config.conv_dim, LANES))
        self.recurrent = self._states[:, :, :value_dim]  # [value heads, Dk, Dv]
        self.window = self._inputs[:, : config.conv_dim]  # [W − 1, channels], before activation

    def pointers(self) -> tuple[int, int]:
        """Addresses of S and of the window."""
        return self._states.data_ptr(), self._inputs.data_ptr()


@dataclass(slots=True)
class NativeState:
    """Everything held of one sequence: a state or cache a layer, the MTP layer's cache last where there is one."""

    layers: list[NativeKeyValueCache | NativeDeltaState] = field(default_factory=list)

    @classmethod
    def empty(cls, config: ModelConfig, *, with_mtp: bool, with_halves: bool) -> NativeState:
        """The state of no tokens. with_halves: what drafts read is kept in 16 bits too."""
        layers = [
            NativeKeyValueCache(config) if kind == FULL_ATTENTION else NativeDeltaState(config)
            for kind in config.layer_types
        ]
        return cls([*layers, *([NativeKeyValueCache(config, has_halves=with_halves)] if with_mtp else [])])

    @property
    def caches(self) -> list[NativeKeyValueCache]:
        """Those that grow."""
        return [layer for layer in self.layers if isinstance(layer, NativeKeyValueCache)]
