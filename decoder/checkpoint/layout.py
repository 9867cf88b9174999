"""What each tensor of a checkpoint does: its role, the part it is counted under, the shard it lies in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from .config import ModelConfig
from .weights import Shape, is_fp8_linear, scale_shape, tensor_shapes


class Role(StrEnum):
    """What a tensor does, which decides how it is initialised and whether it may be FP8."""

    EMBEDDING = "embedding"
    HEAD = "head"
    LINEAR = "linear"  # reads the residual stream, or is a small projection
    OUTPUT = "output"  # linear that writes to the residual stream
    DECAY = "decay"  # A_log
    TIME_BIAS = "time_bias"  # dt_bias
    NORM = "norm"  # x̂·(1 + w)
    GATED_NORM = "gated_norm"  # x̂·w
    FINAL_NORM = "final_norm"
    MTP_NORM = "mtp_norm"
    MTP_INPUT = "mtp_input"  # mtp.fc


_ROLE_BY_NAME = {
    "model.embed_tokens.weight": Role.EMBEDDING,
    "lm_head.weight": Role.HEAD,
    "model.norm.weight": Role.FINAL_NORM,
    "mtp.norm.weight": Role.MTP_NORM,
    "mtp.fc.weight": Role.MTP_INPUT,
}
_ROLE_BY_SUFFIX = {
    "linear_attn.norm.weight": Role.GATED_NORM,
    "norm.weight": Role.NORM,  # every other name that ends so, and q_norm, k_norm, input_layernorm, …
    "pre_fc_norm_embedding.weight": Role.NORM,
    "pre_fc_norm_hidden.weight": Role.NORM,
    "A_log": Role.DECAY,
    "dt_bias": Role.TIME_BIAS,
    "o_proj.weight": Role.OUTPUT,
    "out_proj.weight": Role.OUTPUT,
    "down_proj.weight": Role.OUTPUT,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: name and shape as stored in a text-only checkpoint."""

    name: str
    shape: Shape

    @property
    def role(self) -> Role:
        """By its name."""
        if self.name in _ROLE_BY_NAME:
            return _ROLE_BY_NAME[self.name]
        for suffix, role in _ROLE_BY_SUFFIX.items():
            if self.name.endswith(suffix):
                return role
        return Role.LINEAR

    @property
    def part(self) -> str:
        """The part it is counted under in `model info`."""
        if self.name.startswith("mtp."):
            return "mtp layer" if self.name != "mtp.fc.weight" else "mtp fc"
        if self.role in (Role.EMBEDDING, Role.HEAD):
            return self.role.value
        for marker, part in ((".self_attn.", "attention"), (".linear_attn.", "gated delta net"), (".mlp.", "mlp")):
            if marker in self.name:
                return part
        return "norms"

    @property
    def shard(self) -> str:
        """Stem of its file in a sharded checkpoint, as the published ones name them: layers-N, mtp, outside."""
        pieces = self.name.split(".")
        if pieces[0] == "mtp":
            return "mtp"
        return f"layers-{pieces[2]}" if pieces[1] == "layers" else "outside"

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_fp8_linear(self) -> bool:
        """Whether a block-FP8 checkpoint stores this tensor as FP8."""
        return is_fp8_linear(self.name)

    @property
    def scale_shape(self) -> Shape:
        """Shape of its weight_scale_inv: ⌈N/128⌉ × ⌈K/128⌉."""
        return scale_shape(self.shape)

    @property
    def scale_name(self) -> str:
        """Name of its weight_scale_inv."""
        return self.name + "_scale_inv"


def checkpoint_tensors(config: ModelConfig) -> list[TensorSpec]:
    """All tensors in file order, scales aside."""
    return [TensorSpec(name, shape) for name, shape in tensor_shapes(config).items()]
