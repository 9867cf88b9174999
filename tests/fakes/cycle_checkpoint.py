"""A checkpoint whose greedy output is that of the stand-in decoder: after an id t comes (7 t + 3) mod 97."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

VOCABULARY = 97
CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}


def write_cycle_checkpoint(out: Path) -> Path:
    """Sublayers give nearly nothing, so the residual stream is the embedding E, and lm_head[(7t+3) mod 97] = E[t]."""
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG))  # type: ignore[no-untyped-call, arg-type]
    state = model.state_dict()
    for name, weight in state.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight.mul_(0.01)
    embedding = torch.randn(VOCABULARY, 64)
    state["model.embed_tokens.weight"].copy_(embedding)
    after = torch.tensor([(7 * token + 3) % VOCABULARY for token in range(VOCABULARY)])
    state["lm_head.weight"][after] = embedding / 8
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: weight.bfloat16().contiguous() for name, weight in state.items()}, out / "model.safetensors")
    return out
