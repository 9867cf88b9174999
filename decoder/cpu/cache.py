"""What a sequence leaves behind: keys and values that grow, and GDN states that are overwritten.

A forward of R rows never changes what was committed: it writes keys and values after the committed length, and leaves
its GDN rows pending. `commit(n)` keeps the first n of them. So a rejected draft costs nothing to undo.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..checkpoint.config import FULL_ATTENTION, ModelConfig

SPARE = 1024  # positions allocated beyond what is needed


class KeyValueCache:
    """Keys and values of one attention layer, in fp32; rolling back is a length reset.

    Keys lie transposed, which is how the product with few queries reads them fastest, and rows no longer than needed:
    rows that are far apart in memory cost half as much again. So the cache grows now and then, T positions at present.
    """

    def __init__(self, config: ModelConfig, device: str) -> None:
        heads, dim = config.num_key_value_heads, config.head_dim
        self.keys_t = torch.empty(heads, dim, 0, device=device)  # [kv heads, D, T]
        self.values = torch.empty(heads, 0, dim, device=device)  # [kv heads, T, D]
        self.origin = 0  # the position that lies first: 0 but for an MTP head that reads a prompt's end alone

    @property
    def keys(self) -> torch.Tensor:
        """[kv heads, T, D], a view."""
        return self.keys_t.mT

    def allocate(self, length: int, keep: int = 0) -> None:
        """Make room for `length` positions and some more; the first `keep` stay."""
        heads, dim, _ = self.keys_t.shape
        old_keys, old_values = self.keys_t, self.values
        self.keys_t = old_keys.new_empty(heads, dim, length + SPARE + 16)  # 16: not a power of two
        self.values = old_values.new_empty(heads, length + SPARE + 16, dim)
        self.keys_t[:, :, :keep] = old_keys[:, :, :keep]
        self.values[:, :keep] = old_values[:, :keep]

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: [R, kv heads, D] at places start … start + R − 1, counted from `origin`."""
        rows = keys.shape[0]
        if start + rows > self.values.shape[1]:
            self.allocate(start + rows, keep=start)
        self.keys_t.narrow(2, start, rows).copy_(keys.permute(1, 2, 0))
        self.values.narrow(1, start, rows).copy_(values.transpose(0, 1))


@dataclass(frozen=True, slots=True)
class DeltaUpdate:
    """What a chunk of C rows does to a GDN state: S_n = S·e^{G_n} + Σ_{i ≤ n} e^{G_n − G_i} k_i Δ_iᵀ for any n ≤ C."""

    keys: torch.Tensor  # [value heads, C, Dk]
    deltas: torch.Tensor  # [value heads, C, Dv]
    decay: torch.Tensor  # [value heads, 1, C, C], e^{G_i − G_j} for j ≤ i, else 0
    from_start: torch.Tensor  # [value heads, 1, C, 1], e^{G_i}

    def apply_(self, state: torch.Tensor, num_rows: int) -> None:
        """Advance S [value heads, Dk, Dv] in place by the first `num_rows`: one read, one write."""
        to_last = self.decay.select(2, num_rows - 1).mT  # [value heads, C, 1], 0 from row `num_rows` on
        state.mul_(self.from_start.select(2, num_rows - 1)).baddbmm_(self.keys.mT, self.deltas * to_last)


@dataclass(slots=True)
class PendingRows:
    """The uncommitted rows of one GDN layer's last forward, R of them; rows before `first` are in S already."""

    first: int
    window: torch.Tensor  # [W − 1 + R, channels], conv inputs: the committed window, then the rows
    update: DeltaUpdate  # of the R − first rows


class DeltaNetState:
    """Committed state of one GDN layer: the matrix S and the last W − 1 conv inputs, before activation."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        shape = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
        self.recurrent = torch.zeros(shape, device=device)
        self.no_inputs = torch.zeros(config.linear_conv_kernel_dim - 1, config.conv_dim, device=device)
        self.window = self.no_inputs
        self.pending: PendingRows | None = None

    def reset(self) -> None:
        """Back to an empty sequence."""
        self.recurrent.zero_()
        self.window = self.no_inputs
        self.pending = None

    def commit(self, num_rows: int) -> None:
        """Keep the first `num_rows` of the pending forward."""
        pending = self.pending
        assert pending is not None, "commit follows a forward"
        assert num_rows > pending.first, "rows of earlier chunks are in the state already"
        pending.update.apply_(self.recurrent, num_rows - pending.first)
        self.window = pending.window.narrow(0, num_rows, self.window.shape[0])
        self.pending = None


@dataclass(slots=True)
class SequenceState:
    """Everything the target model holds of one sequence, a state or cache a layer."""

    layers: list[KeyValueCache | DeltaNetState] = field(default_factory=list)

    @classmethod
    def empty(cls, config: ModelConfig, device: str) -> SequenceState:
        """The state of no tokens."""
        return cls(
            [
                KeyValueCache(config, device) if kind == FULL_ATTENTION else DeltaNetState(config, device)
                for kind in config.layer_types
            ]
        )

    def reset(self, length: int) -> None:
        """Back to an empty sequence, with room for `length` tokens to come."""
        for layer in self.layers:
            if isinstance(layer, DeltaNetState):
                layer.reset()
            else:
                layer.allocate(length)

    def commit(self, num_rows: int) -> None:
        """Keep the first `num_rows` of the last forward."""
        for layer in self.layers:
            if isinstance(layer, DeltaNetState):
                layer.commit(num_rows)
