"""A small random checkpoint whose greedy text hangs on its whole context, and engines broken in known ways."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
BLOCK = 128
KV_BLOCK = 16


def random_model(seed: int = 0) -> Qwen3_5ForCausalLM:
    """fp32 model with bf16-valued weights. Sharp attention and large sublayer outputs, so that context decides."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG))  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(1.0)
            weight.copy_(weight.bfloat16())
        model.model.embed_tokens.weight.normal_(0, 1.0, generator=generator)
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.bfloat16())
    torch.nn.Module.eval(model)
    return model


def write(model: Qwen3_5ForCausalLM, out: Path) -> Path:
    """Saves it as a bf16 checkpoint with the names that multimodal checkpoints use, and an MTP tensor to be ignored."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": CONFIG}))
    tensors = {_checkpoint_name(name): weight.bfloat16().contiguous() for name, weight in model.state_dict().items()}
    save_file({**tensors, "mtp.fc.weight": torch.zeros(4, 4)}, out / "model.safetensors")
    return out


def write_fp8(model: Qwen3_5ForCausalLM, out: Path) -> dict[str, Tensor]:
    """Saves the MLPs in FP8 with a scale of its own in every (ragged) block; returns their exact fp32 values."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}))
    tensors, exact = {}, {}
    for name, weight in model.state_dict().items():
        if ".mlp." not in name:
            tensors[name] = weight.bfloat16().contiguous()
            continue
        codes = (weight * 16).to(torch.float8_e4m3fn)
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        scale = (1 + torch.arange(rows * columns).reshape(rows, columns) / 8).bfloat16() / 16
        exact[name] = codes.float().clone()
        for row in range(rows):
            for column in range(columns):
                exact[name][row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK] *= scale[
                    row, column
                ]
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scale
    save_file(tensors, out / "model.safetensors")
    return exact


@torch.no_grad()
def greedy(
    model: Qwen3_5ForCausalLM,
    prompt: list[int],
    length: int,
    *,
    position_shift: int = 0,
    stale_kv_at: int | None = None,
    sample_seed: int | None = None,
) -> list[int]:
    """A plain engine: prefill, then a token a step. The options are faults that engines have had.

    position_shift: decoded tokens sit that many positions too far. stale_kv_at: from that step on a block of
    the KV cache holds what another one left there. sample_seed: draws from the softmax instead of taking the top.
    """
    sampler = torch.Generator().manual_seed(sample_seed or 0)
    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits[0, -1]
    output: list[int] = []
    for step in range(length):
        if sample_seed is None:
            output.append(int(logits.argmax()))
        else:
            output.append(int(torch.multinomial(logits.softmax(-1), 1, generator=sampler)))
        if step == stale_kv_at:
            _leave_stale(cache, len(prompt) - KV_BLOCK)
        position = torch.tensor([[len(prompt) + step + position_shift]])
        ids = torch.tensor([[output[-1]]])
        logits = model(ids, position_ids=position, past_key_values=cache, use_cache=True).logits[0, -1]
    return output


def _leave_stale(cache: DynamicCache, slot: int) -> None:
    for layer in cache.layers:
        for state in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if state is not None:
                state[:, :, slot : slot + KV_BLOCK] = state[:, :, :KV_BLOCK].clone()


def _checkpoint_name(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
