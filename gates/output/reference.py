"""The reference: the transformers implementation on weights dequantised by us, reading text that an engine emitted.

Nobody's kernels: FP8 blocks become plain fp32 or bf16 tensors (value × scale, never rounded), and the model reads
prompt + output once, in chunks with a cache, so that a context of 64K fits. Logits exist at output positions only.
"""

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from ...harness.errors import KernarcError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ALWAYS_FLOAT32 = ("A_log", "dt_bias")
BLOCK = 128  # rows and columns that share an FP8 scale
LOGIT_ROWS_BYTES = 256 << 20  # logits held at once

_new_model: Callable[[Qwen3_5TextConfig], Qwen3_5ForCausalLM] = Qwen3_5ForCausalLM


class ReferenceModelError(KernarcError):
    """A checkpoint the reference cannot read; the output check then cannot run, and nothing passes."""


class Reference:
    """One checkpoint in one precision on one device; reads prompt and output, yields logits of the output positions."""

    def __init__(self, model: Qwen3_5ForCausalLM, chunk_tokens: int) -> None:
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._prompt: tuple[int, ...] = ()
        self._prompt_cache: DynamicCache | None = None

    @classmethod
    def load(
        cls, model_dir: Path, dtype: str = "float32", device: str = "auto", chunk_tokens: int = 2048
    ) -> "Reference":
        """Raises ReferenceModelError where files are missing, misshapen or of another architecture."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        logging.getLogger("transformers").setLevel(logging.ERROR)  # it advises on kernels, which we do not want here
        config = _text_config(model_dir)
        with torch.device("meta"):
            model = _new_model(config)
        state = dict(_dequantised(model_dir, DTYPES[dtype], device))
        if config.tie_word_embeddings and "lm_head.weight" not in state:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        try:
            model.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:
            raise ReferenceModelError(
                f"{model_dir} does not hold a complete qwen3_5 text model: {error}", "check the checkpoint's shards"
            ) from error
        with torch.device(device):  # its frequencies are no weights, so they were left on "meta"
            model.model.rotary_emb = Qwen3_5TextRotaryEmbedding(config)
        torch.nn.Module.eval(model)
        return cls(model, chunk_tokens)

    @property
    def vocab_size(self) -> int:
        """Ids from this on are not tokens."""
        return int(self._model.config.vocab_size)

    @torch.inference_mode()
    def logit_rows(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Iterator[Tensor]:
        """fp32 logits of the output positions in chunks [rows, vocab]; row i is what the reference says about output i.

        The state after the prompt is kept, so that several outputs of one prompt cost one prefill.
        """
        if not prompt_ids or not output_ids:
            raise ValueError("a prompt and an output of at least one token each")
        cache = copy.deepcopy(self._after_prompt(prompt_ids))
        read = [prompt_ids[-1], *output_ids[:-1]]
        rows = max(1, min(self._chunk_tokens, LOGIT_ROWS_BYTES // (4 * self.vocab_size)))
        for start in range(0, len(read), rows):
            yield self._forward(read[start : start + rows], cache, every_row=True).float()

    def _after_prompt(self, prompt_ids: Sequence[int]) -> DynamicCache:
        """The state after all but the last prompt token."""
        prompt = tuple(prompt_ids)
        if self._prompt_cache is None or prompt != self._prompt:
            self._prompt_cache = None  # frees the last prompt's before the next one is read
            cache = DynamicCache(config=self._model.config)
            for start in range(0, len(prompt) - 1, self._chunk_tokens):
                self._forward(prompt[start : min(start + self._chunk_tokens, len(prompt) - 1)], cache, every_row=False)
            self._prompt, self._prompt_cache = prompt, cache
        return self._prompt_cache

    def _forward(self, ids: Sequence[int], cache: DynamicCache, *, every_row: bool) -> Tensor:
        tokens = torch.tensor([list(ids)], device=self._model.lm_head.weight.device)
        output = self._model(
            input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=0 if every_row else 1
        )
        logits: Tensor = output.logits[0]
        return logits


def model_sha256(model_dir: Path) -> str:
    """Hash of the configuration and of every weight file, in full: a changed scale must not find an old result."""
    digest = hashlib.sha256()
    for path in [model_dir / "config.json", *sorted(model_dir.glob("*.safetensors"))]:
        digest.update(path.name.encode())
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ReferenceModelError(f"cannot read {path}: {error}", "name a checkpoint directory") from error
    return digest.hexdigest()


def _text_config(model_dir: Path) -> Qwen3_5TextConfig:
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReferenceModelError(f"cannot read {path}: {error}", "name a checkpoint directory") from error
    text = {"tie_word_embeddings": raw.get("tie_word_embeddings", False), **raw.get("text_config", raw)}
    blocks = raw.get("quantization_config", {}).get("weight_block_size", [BLOCK, BLOCK])
    if blocks != [BLOCK, BLOCK]:
        raise ReferenceModelError(f"{path}: weight_block_size {blocks} is not [{BLOCK}, {BLOCK}]")
    if text.get("model_type") not in ("qwen3_5", "qwen3_5_text"):
        raise ReferenceModelError(
            f"{path}: model_type {text.get('model_type')!r} is not qwen3_5", "see the supported models"
        )
    return Qwen3_5TextConfig(**{key: value for key, value in text.items() if key != "quantization_config"})


def _dequantised(model_dir: Path, dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor]]:
    """(name in transformers' text model, tensor) of every tensor that model has; FP8 multiplied by its block scales."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ReferenceModelError(f"{model_dir} holds no .safetensors file", "name a checkpoint directory")
    try:
        opened: list[Any] = [safe_open(file, framework="pt", device="cpu") for file in files]
        where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118  safe_open is not a mapping
        for name, file in where.items():
            ours = _reference_name(name)
            if ours is None:
                continue
            tensor = file.get_tensor(name).to(device)
            scale_name = f"{name}_scale_inv"
            if tensor.dtype == torch.float8_e4m3fn:
                if scale_name not in where:
                    raise ReferenceModelError(f"{name} is FP8 and has no {scale_name.rpartition('.')[2]}")
                tensor = dequantise(tensor, where[scale_name].get_tensor(scale_name).to(device), name)
            kept = torch.float32 if name.endswith(ALWAYS_FLOAT32) else dtype
            yield ours, tensor.to(kept)
    except SafetensorError as error:
        raise ReferenceModelError(f"{model_dir}: {error}", "the file is truncated or not safetensors") from error


def dequantise(weight: Tensor, scale: Tensor, name: str, block: int = BLOCK) -> Tensor:
    """FP8 [N, K] × scale [⌈N/128⌉, ⌈K/128⌉] of its block → fp32 [N, K]. The scale multiplies, `_inv` or not."""
    rows, columns = weight.shape
    expected = (-(-rows // block), -(-columns // block))
    if tuple(scale.shape) != expected:
        raise ReferenceModelError(f"{name}_scale_inv has shape {tuple(scale.shape)}, expected {expected}")
    spread = scale.float().repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return weight.float() * spread


def _reference_name(name: str) -> str | None:
    """The text model's name of a checkpoint tensor; None for scales, vision and MTP, which it does not have."""
    if name.endswith("_scale_inv") or name.startswith(("mtp.", "model.visual.")):
        return None
    return name.replace("model.language_model.", "model.", 1)
