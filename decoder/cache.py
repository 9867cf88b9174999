"""What a sequence leaves behind: keys and values that grow, and GDN states that are overwritten.

A forward of R rows never changes what was committed: it writes keys and values after the committed length, and leaves
its GDN rows pending. `commit(n)` keeps the first n of them. So a rejected draft costs nothing to undo.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .config import FULL_ATTENTION, ModelConfig


class KeyValueCache:
    """Keys and values of one attention layer, [kv heads, T, head_dim] each; rolling back is a length reset."""

    def __init__(self, config: ModelConfig, max_context: int, dtype: torch.dtype, device: str) -> None:
        shape = (config.num_key_value_heads, max_context, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)


@dataclass(slots=True)
class PendingRows:
    """The uncommitted rows of one GDN layer's last forward, R of them; rows before `first` are in the state already."""

    first: int
    window: torch.Tensor  # [W − 1 + R, channels], conv inputs: the committed window, then the rows
    keys: torch.Tensor  # [value heads, R − first, key dim]
    deltas: torch.Tensor  # [value heads, R − first, value dim]
    log_decay: torch.Tensor  # [value heads, R − first, 1], summed from row `first` on


class DeltaNetState:
    """Committed state of one GDN layer: the matrix S and the last W − 1 conv inputs."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        heads, key_dim, value_dim = (
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        self.recurrent = torch.zeros(heads, key_dim, value_dim, dtype=torch.float32, device=device)
        self.window = torch.zeros(config.linear_conv_kernel_dim - 1, config.conv_dim, dtype=dtype, device=device)
        self.pending: PendingRows | None = None

    def reset(self) -> None:
        """Back to an empty sequence."""
        self.recurrent.zero_()
        self.window.zero_()
        self.pending = None

    def commit(self, num_rows: int) -> None:
        """Keep the first `num_rows` of the pending forward: S ← S·e^G + Σ k_i (e^(G − G_i) Δ_i)ᵀ."""
        rows = self.pending
        assert rows is not None, "commit follows a forward"
        assert num_rows > rows.first, "rows of earlier chunks are in the state already"
        count = num_rows - rows.first
        log_decay = rows.log_decay[:, :count]
        total = log_decay[:, -1:]  # [heads, 1, 1]
        deltas = rows.deltas[:, :count] * (total - log_decay).exp_()
        self.recurrent.mul_(total.exp()).baddbmm_(rows.keys[:, :count].mT, deltas)
        self.window.copy_(rows.window[num_rows : num_rows + self.window.shape[0]])
        self.pending = None


@dataclass(slots=True)
class SequenceState:
    """Everything the target model holds of one sequence, a state or cache a layer."""

    layers: list[KeyValueCache | DeltaNetState] = field(default_factory=list)

    @classmethod
    def allocate(cls, config: ModelConfig, max_context: int, dtype: torch.dtype, device: str) -> SequenceState:
        """Room for `max_context` tokens."""
        return cls(
            [
                KeyValueCache(config, max_context, dtype, device)
                if kind == FULL_ATTENTION
                else DeltaNetState(config, dtype, device)
                for kind in config.layer_types
            ]
        )

    def reset(self) -> None:
        """Back to an empty sequence."""
        for layer in self.layers:
            if isinstance(layer, DeltaNetState):
                layer.reset()

    def commit(self, num_rows: int) -> None:
        """Keep the first `num_rows` of the last forward."""
        for layer in self.layers:
            if isinstance(layer, DeltaNetState):
                layer.commit(num_rows)
