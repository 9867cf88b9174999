"""What a card must have and a model must be for the CUDA session: checked before a weight is read."""

from __future__ import annotations

import math

import torch

from ..checkpoint.config import FULL_ATTENTION, ModelConfig
from ..checkpoint.weights import Checkpoint, is_fp8_linear
from ..errors import DecoderError
from .kernels.launch import RING
from .kernels.linear_shape import most_rows
from .kernels.nvrtc import SHARED_LIMIT_BYTES
from .prefill import PIECE_ROWS
from .state import SPARE_POSITIONS

MIN_CAPABILITY = (8, 0)
MIN_SHARED_BYTES = SHARED_LIMIT_BYTES[80]  # sm_86, sm_89 and sm_120 have 99 KiB
MAX_DRAFTS = 8
_RESERVE_BYTES = 2 << 30  # the largest matrix unpacked, graphs, the CUDA context's own growth
_DTYPE_BYTES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}


def check_card(device: torch.device) -> None:
    """Raise DecoderError unless `device` is a CUDA card of capability 8.0 or later with A100's shared memory."""
    if not torch.cuda.is_available():
        raise DecoderError(
            "no CUDA card is available to this Python",
            "Use --device cpu, or install a CUDA build of torch and check that nvidia-smi lists a card.",
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise DecoderError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, the kernels need 8.0 (A100) or later",
            "Use --device cpu or another card.",
        )
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", MIN_SHARED_BYTES)  # older torch does not tell
    if shared < MIN_SHARED_BYTES:
        raise DecoderError(
            f"{torch.cuda.get_device_name(device)} has {shared // 1024} KiB of shared memory a block, the kernels need "
            f"{MIN_SHARED_BYTES // 1024} (A100, H100, H200)",
            "Use --device cpu or another card.",
        )


def check_shapes(config: ModelConfig) -> None:
    """Raise DecoderError naming the first dimension that the kernels do not cover."""
    group = config.num_attention_heads // config.num_key_value_heads
    powers = ("head_dim", "linear_key_head_dim", "linear_value_head_dim")
    rules = [
        *(
            (f"{name} {getattr(config, name)}", _is_power(getattr(config, name)), "a power of two ≥ 16")
            for name in powers
        ),
        (f"hidden_size {config.hidden_size}", config.hidden_size % 32 == 0, "a multiple of 32"),
        (f"intermediate_size {config.intermediate_size}", config.intermediate_size % 16 == 0, "a multiple of 16"),
        (f"vocab_size {config.vocab_size}", config.vocab_size % 16 == 0, "a multiple of 16"),
        (f"{group} query heads a key head", group <= 32, "at most 32"),
        (f"rotary dimensions {config.rotary_dim}", config.rotary_dim % 2 == 0, "even"),
    ]
    for found, fits, needed in rules:
        if not fits:
            raise DecoderError(f"unsupported shape on a GPU: {found}, expected {needed}", "Use --device cpu.")


def most_drafts(config: ModelConfig, device: torch.device) -> int:
    """Drafts of a step, at most MAX_DRAFTS, whose verify fits the card's SMs: a product keeps its rows of x in one."""
    if device.type != "cuda":
        return MAX_DRAFTS
    hidden, inner, attention = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads * config.head_dim,
    )
    sizes = [
        (config.conv_dim + config.value_dim, hidden),
        (hidden, config.value_dim),
        (2 * attention + 2 * config.num_key_value_heads * config.head_dim, hidden),
        (hidden, attention),
        (2 * inner, hidden),
        (hidden, inner),
        *([(hidden, 2 * hidden)] if config.has_mtp else []),  # mtp.fc
    ]
    major, minor = torch.cuda.get_device_capability(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return most_rows(sizes, MAX_DRAFTS + 1, processors, 10 * major + minor) - 1


def check_drafts(num_drafts: int, config: ModelConfig, device: torch.device) -> None:
    """Raise DecoderError where a step of so many drafts does not fit the card."""
    most = most_drafts(config, device)
    if num_drafts > most:
        raise DecoderError(
            f"a step of {num_drafts} drafts verifies {num_drafts + 1} rows, more than this model's widest product "
            f"holds on {torch.cuda.get_device_name(device)}",
            f"ask for at most {most} drafts" if most >= 0 else "use --device cpu",
        )


def required_bytes(
    checkpoint: Checkpoint,
    config: ModelConfig,
    max_context: int,
    *,
    with_mtp: bool,
    draft_rows: int = 0,
    quantize: bool = False,
) -> dict[str, int]:
    """Device memory by part, from the checkpoint's headers and the config alone.

    draft_rows: of a reduced draft head. quantize: linears that are not FP8 become so on load.
    """
    stored = {
        name: math.prod(tensor.shape) * (1 if quantize and is_fp8_linear(name) else _DTYPE_BYTES[tensor.dtype])
        for name, tensor in checkpoint.tensors.items()
        if with_mtp or not name.startswith("mtp.")
    }
    vocabulary = config.vocab_size * config.hidden_size
    attention = sum(kind == FULL_ATTENTION for kind in config.layer_types) + int(with_mtp)
    capacity = max_context + SPARE_POSITIONS
    key_bytes = 2 * config.num_key_value_heads * config.head_dim * 2  # keys and values, fp16
    delta_nets = len(config.layer_types) - attention + int(with_mtp)
    heads, key_dim, value_dim = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    rings = RING.value * (heads * (key_dim + value_dim + 2) * 4 + config.conv_dim * 2)
    return {
        "weights": sum(stored.values()) + (2 * vocabulary if config.tie_word_embeddings else 0),
        "int8 copy of the head": vocabulary,
        "reduced draft head": draft_rows * config.hidden_size,
        "keys and values": attention * capacity * key_bytes + capacity * config.rotary_dim * 2,
        "gated delta net state": delta_nets * (heads * key_dim * value_dim * 4 + rings),
        "packing and prefill": max(3 * 2 * vocabulary, min(max_context, PIECE_ROWS) * prompt_row_bytes(config))
        + _RESERVE_BYTES,
    }


def prompt_row_bytes(config: ModelConfig) -> int:
    """What a token of a pass over a prompt holds at most: the residual stream, its norms, a layer's widest moment."""
    heads, key_dim, value_dim = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    mlp = 2 * (2 + 1) * config.intermediate_size
    chunks = heads * (2 * (key_dim + value_dim) + 88)  # u, w, scores and decays of gdn_prefill_cuda.py
    delta_net = 2 * (2 * config.conv_dim + 3 * config.value_dim) + chunks
    attention = 2 * (2 * queries + 2 * keys) + 2 * 3 * queries
    return 11 * config.hidden_size + max(mlp, delta_net, attention)


def check_memory(
    checkpoint: Checkpoint,
    config: ModelConfig,
    max_context: int,
    device: torch.device,
    *,
    with_mtp: bool,
    draft_rows: int = 0,
    quantize: bool = False,
) -> None:
    """Raise DecoderError with the accounts when the card's free memory cannot hold the model at `max_context`."""
    parts = required_bytes(checkpoint, config, max_context, with_mtp=with_mtp, draft_rows=draft_rows, quantize=quantize)
    free, _ = torch.cuda.mem_get_info(device)
    needed = sum(parts.values())
    if needed > free:
        accounts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.items())
        raise DecoderError(
            f"the card has {free / 2**30:.1f} GiB free, this model needs {needed / 2**30:.1f} at a context of "
            f"{max_context:,} ({accounts})",
            "Lower --max-context, free the card, or use another one.",
        )


def _is_power(value: int) -> bool:
    return value >= 16 and value & (value - 1) == 0
