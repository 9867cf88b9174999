"""The checkpoint directory: weights in bf16, config, tokenizer, held-out list and the card."""

from __future__ import annotations

from json import dumps
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from .model import TrainingModel
from .tokenizer import save_tokenizer

MAX_BYTES = 16_000_000


def checkpoint_tensors(model: TrainingModel) -> dict[str, torch.Tensor]:
    """Every weight by its checkpoint name, bf16 on the CPU; a tied head is left out."""
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in model.state_dict().items()}
    if model.shape.tied:
        del tensors["lm_head.weight"]
    return tensors


def save_weights(model: TrainingModel, folder: Path) -> None:
    """Writes model.safetensors, replacing an older one only when the new one is whole."""
    partial = folder / "model.safetensors.partial"
    save_file(checkpoint_tensors(model), str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")


def save_checkpoint(model: TrainingModel, tokenizer: Tokenizer, held_out: dict[str, object], folder: Path) -> None:
    """Writes everything but the card."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    save_weights(model, folder)
    save_tokenizer(tokenizer, folder, shape.max_positions)
    generation = {"do_sample": False, "eos_token_id": shape.eos_token_id}
    for name, content in (("config", shape.to_config()), ("generation_config", generation), ("heldout", held_out)):
        (folder / f"{name}.json").write_text(dumps(content, indent=2) + "\n")


def load_weights(model: TrainingModel, folder: Path) -> None:
    """Reads a checkpoint directory's weights into a training model (fp32)."""
    from safetensors.torch import load_file

    tensors = {name: t.float() for name, t in load_file(str(folder / "model.safetensors")).items()}
    if model.shape.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
