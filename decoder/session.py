"""What may be asked of a decoder's session, and which implementation serves it on which device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from .checkpoint.config import ModelConfig
from .checkpoint.draft_vocabulary import DraftVocabulary
from .checkpoint.weights import Checkpoint, load_weights
from .cpu.session import TorchSession
from .draft_context import DraftReading, resolve_reading
from .errors import RequestError
from .native.library import native_library
from .native.session import NativeSession

MAX_SPECULATIVE_TOKENS = 8
AUTO = "auto"  # as a number of drafts: chosen by step (draft_length.py)


class Session(Protocol):
    """One sequence on one device."""

    context_length: int  # tokens whose state is held

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Reset, read the whole prompt, return the first greedy token."""
        ...

    def step(self, num_drafts: int) -> tuple[list[int], int]:
        """Draft, verify, commit: (1 … num_drafts + 1 new tokens, how many of them were drafts)."""
        ...


@runtime_checkable
class RunsAhead(Protocol):
    """A session that starts the next step early: its tokens may come from a step with other drafts than asked for."""

    drafted: int  # drafts verified by the step that gave the last tokens


@runtime_checkable
class LimitsDrafts(Protocol):
    """A session that takes fewer drafts a step than MAX_SPECULATIVE_TOKENS, because of what it runs on."""

    max_drafts: int


def most_drafts(session: Session) -> int:
    """Of one step."""
    return session.max_drafts if isinstance(session, LimitsDrafts) else MAX_SPECULATIVE_TOKENS


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How to load and run a model.

    device: auto, cpu or cuda. dtype: only fp32 on a CPU and only unset on a card, whose kernels fix theirs.
    num_speculative_tokens: 0 leaves the MTP head out; AUTO. max_context: prompt and output together, the model's own
    limit unless given. draft_vocab: the file of the tokens that may be drafted (draft_vocabulary.py). draft_window: how
    many of a prompt's last positions the MTP head reads, draft_context: how many of these are finished for it; a number
    or ALL, the device's own default unless given (draft_context.py). The output changes with none of them. native: the
    C++ path on a CPU, always or never; unless given, where it can be compiled. On a card, quantize "fp8": the large
    linears of an unquantised checkpoint become block FP8 as they are loaded; prefill_dtype "fp8": prompts are read with
    FP8 products.
    """

    device: str = "auto"
    dtype: torch.dtype | None = None
    num_speculative_tokens: int | str = 3
    max_context: int | None = None
    draft_vocab: Path | None = None
    draft_window: int | str | None = None
    draft_context: int | str | None = None
    native: bool | None = None
    quantize: str | None = None
    prefill_dtype: str = "bf16"

    @property
    def max_drafts(self) -> int:
        """The most drafts of a step."""
        drafts = self.num_speculative_tokens
        return drafts if isinstance(drafts, int) else MAX_SPECULATIVE_TOKENS

    @property
    def is_adaptive(self) -> bool:
        """Whether drafts are chosen by step."""
        return self.num_speculative_tokens == AUTO


def check_drafts(num_speculative_tokens: int | str, has_mtp: bool) -> None:
    """Raise RequestError for a number that no step can draft here."""
    allowed = f"0 … {MAX_SPECULATIVE_TOKENS} or {AUTO}"
    if isinstance(num_speculative_tokens, str):
        if num_speculative_tokens != AUTO:
            raise RequestError(f"num_speculative_tokens is {num_speculative_tokens!r}, expected {allowed}")
    elif not 0 <= num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
        raise RequestError(f"num_speculative_tokens is {num_speculative_tokens}, expected {allowed}")
    if num_speculative_tokens and not has_mtp:
        raise RequestError(
            f"num_speculative_tokens is {num_speculative_tokens}, but no MTP head is loaded",
            "Use 0, or load a checkpoint with an MTP head and num_speculative_tokens above 0.",
        )


def open_session(model_dir: Path, config: ModelConfig, options: SessionOptions) -> tuple[Session, str, int]:
    """(session, device, max_context). Raises CheckpointError for the checkpoint, RequestError for an option."""
    check_drafts(options.num_speculative_tokens, config.has_mtp)
    window = config.max_position_embeddings
    max_context = window if options.max_context is None else options.max_context
    if not 2 <= max_context <= window:
        raise RequestError(f"max_context is {max_context}, expected 2 … {window} (max_position_embeddings)")
    device = _resolve_device(options.device)
    _check_dtypes(options, device)
    reading = resolve_reading(options.draft_window, options.draft_context, device, config)
    vocabulary = None
    if options.draft_vocab is not None:
        vocabulary = DraftVocabulary.read(options.draft_vocab, config.vocab_size)
        if options.max_drafts == 0:
            raise RequestError("a draft vocabulary is given, but no tokens are drafted", "leave out one of the two")
    checkpoint = Checkpoint(model_dir, config)
    if device == "cuda":
        return _cuda_session(checkpoint, config, max_context, options, vocabulary), device, max_context
    return _cpu_session(checkpoint, config, max_context, options, vocabulary, reading), device, max_context


def _resolve_device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device is {device!r}, expected auto, cpu or cuda")
    if device == "auto":
        usable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
        return "cuda" if usable else "cpu"
    return device


def _check_dtypes(options: SessionOptions, device: str) -> None:
    if options.quantize not in (None, "fp8"):
        raise RequestError(f"quantize is {options.quantize!r}, expected fp8")
    if options.prefill_dtype not in ("bf16", "fp8"):
        raise RequestError(f"prefill_dtype is {options.prefill_dtype!r}, expected bf16 or fp8")
    if device == "cpu":
        if options.dtype not in (None, torch.float32):
            raise RequestError(f"dtype is {options.dtype}, the CPU path computes in torch.float32")
        if options.quantize or options.prefill_dtype == "fp8":
            raise RequestError(
                "the CPU path computes in fp32 on the weights as stored: it neither quantises nor multiplies in FP8",
                "leave out --quantize and --prefill-dtype; `kernarc-gate model quantize` writes an FP8 checkpoint",
            )
    elif options.dtype is not None:
        raise RequestError(
            f"dtype is {options.dtype}, but the CUDA kernels fix their own: fp16 between kernels, fp32 sums",
            "leave dtype out on a card",
        )


def _cpu_session(
    checkpoint: Checkpoint,
    config: ModelConfig,
    max_context: int,
    options: SessionOptions,
    vocabulary: DraftVocabulary | None,
    reading: DraftReading,
) -> Session:
    weights = load_weights(checkpoint, torch.float32, with_mtp=options.max_drafts > 0)
    library = native_library(options.native)
    if library is None:
        return TorchSession(config, weights, max_context=max_context, draft_vocabulary=vocabulary, reading=reading)
    return NativeSession(
        library, config, weights, max_context=max_context, draft_vocabulary=vocabulary, reading=reading
    )


def _cuda_session(
    checkpoint: Checkpoint,
    config: ModelConfig,
    max_context: int,
    options: SessionOptions,
    vocabulary: DraftVocabulary | None,
) -> Session:
    from .cuda.session import CudaSession  # here, because a CPU installation has no triton

    return CudaSession.load(
        checkpoint,
        config,
        max_context=max_context,
        num_speculative_tokens=options.max_drafts,
        as_many_as_fit=options.is_adaptive,
        draft_vocabulary=vocabulary,
        prefill_fp8=options.prefill_dtype == "fp8",
        quantize=options.quantize == "fp8",
    )
