"""The dimensions of the model that ships, and the config.json that describes them to every engine."""

from __future__ import annotations

from dataclasses import dataclass
from json import loads
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """Dimensions of a qwen3_5_text model; every linear dimension is a multiple of 128 so that FP8 blocks are whole."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_key_heads: int = 2
    linear_value_heads: int = 2
    linear_head_dim: int = 128
    conv_width: int = 4
    rotary_dim: int = 16
    rope_theta: float = 1e7
    rms_norm_eps: float = 1e-6
    tied: bool = True
    max_positions: int = 16384
    eos_token_id: int = 0

    @property
    def key_dim(self) -> int:
        """Width of all key heads of a Gated DeltaNet layer together."""
        return self.linear_key_heads * self.linear_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all value heads of a Gated DeltaNet layer together."""
        return self.linear_value_heads * self.linear_head_dim

    def is_full_attention(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) is full attention rather than Gated DeltaNet."""
        return (layer + 1) % self.full_attention_interval == 0

    @classmethod
    def from_directory(cls, folder: Path) -> Shape:
        """The shape that a checkpoint written by this package has."""
        c = loads((folder / "config.json").read_text())
        rope = c["rope_parameters"]
        return cls(
            vocab_size=c["vocab_size"],
            hidden_size=c["hidden_size"],
            intermediate_size=c["intermediate_size"],
            num_layers=c["num_hidden_layers"],
            full_attention_interval=c["full_attention_interval"],
            num_attention_heads=c["num_attention_heads"],
            num_key_value_heads=c["num_key_value_heads"],
            head_dim=c["head_dim"],
            linear_key_heads=c["linear_num_key_heads"],
            linear_value_heads=c["linear_num_value_heads"],
            linear_head_dim=c["linear_key_head_dim"],
            conv_width=c["linear_conv_kernel_dim"],
            rotary_dim=round(rope["partial_rotary_factor"] * c["head_dim"]),
            rope_theta=rope["rope_theta"],
            rms_norm_eps=c["rms_norm_eps"],
            tied=c["tie_word_embeddings"],
            max_positions=c["max_position_embeddings"],
            eos_token_id=c["eos_token_id"],
        )

    def to_config(self) -> dict[str, object]:
        """The config.json of this shape (transformers' `qwen3_5_text`, with the MTP layer count vLLM reads)."""
        kinds = ["full_attention" if self.is_full_attention(n) else "linear_attention" for n in range(self.num_layers)]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "full_attention_interval": self.full_attention_interval,
            "layer_types": kinds,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "attn_output_gate": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "linear_num_key_heads": self.linear_key_heads,
            "linear_num_value_heads": self.linear_value_heads,
            "linear_key_head_dim": self.linear_head_dim,
            "linear_value_head_dim": self.linear_head_dim,
            "linear_conv_kernel_dim": self.conv_width,
            "mamba_ssm_dtype": "float32",
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
            },
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": None,
            "pad_token_id": None,
            "eos_token_id": self.eos_token_id,
        }


SHIPPED = Shape()
SMOKE = Shape(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=128,
    num_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    linear_key_heads=1,
    linear_value_heads=1,
    head_dim=64,
)
