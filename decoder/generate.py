"""Greedy speculative generation: the loop, and the session it drives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch

from .config import ModelConfig
from .draft_vocabulary import DraftVocabulary
from .errors import DecoderError, RequestError
from .native.library import native_library
from .native.session import NativeSession
from .session import TorchSession
from .weights import Checkpoint, load_weights

MAX_SPECULATIVE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Step:
    """One decoder step as the caller sees it.

    token_ids: the new tokens, at least one. drafted: drafts verified in this step. accepted: drafts among `token_ids`,
    counted after trimming at a stop token or at max_tokens.
    """

    token_ids: tuple[int, ...]
    drafted: int
    accepted: int


class Session(Protocol):
    """One sequence on one device."""

    context_length: int  # tokens whose state is held

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Reset, read the whole prompt, return the first greedy token."""
        ...

    def step(self, num_drafts: int) -> tuple[list[int], int]:
        """Draft, verify, commit: (1 … num_drafts + 1 new tokens, how many of them were drafts)."""
        ...


class Decoder:
    """Weights and one session, loaded once; generates one sequence at a time."""

    def __init__(
        self, config: ModelConfig, session: Session, *, device: str, max_context: int, num_speculative_tokens: int
    ) -> None:
        self.config = config
        self.session = session
        self.device = device
        self.max_context = max_context
        self.num_speculative_tokens = num_speculative_tokens
        self.eos_token_ids = config.eos_token_ids
        self._generation = 0  # which generate() owns the session

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        *,
        device: str = "auto",
        dtype: torch.dtype | None = None,
        num_speculative_tokens: int = 3,
        max_context: int | None = None,
        draft_vocab: str | Path | None = None,
        native: bool | None = None,
    ) -> Self:
        """Load a checkpoint directory.

        device: auto, cpu or cuda. dtype: the device's own unless given, fp32 on a CPU. 0 speculative tokens leaves the
        MTP head out. max_context: prompt and output together, the model's own limit unless given. draft_vocab: the
        file of the tokens that may be drafted (draft_vocabulary.py); the output does not change. native: the C++ path
        on a CPU, always or never; unless given, where it can be compiled (native/library.py).
        Raises CheckpointError for the checkpoint, RequestError for a setting outside its range.
        """
        config = ModelConfig.from_directory(model_dir)
        _check_drafts(num_speculative_tokens, config.has_mtp)
        window = config.max_position_embeddings
        max_context = window if max_context is None else max_context
        if not 2 <= max_context <= window:
            raise RequestError(f"max_context is {max_context}, expected 2 … {window} (max_position_embeddings)")
        device = _resolve_device(device)
        vocabulary = None if draft_vocab is None else DraftVocabulary.read(Path(draft_vocab), config.vocab_size)
        if vocabulary is not None and num_speculative_tokens == 0:
            raise RequestError("a draft vocabulary is given, but no tokens are drafted", "leave out one of the two")
        checkpoint = Checkpoint(model_dir, config)
        session = (
            _cuda_session(checkpoint, config, max_context, num_speculative_tokens, vocabulary)
            if device == "cuda"
            else _cpu_session(checkpoint, config, max_context, num_speculative_tokens, dtype, vocabulary, native)
        )
        return cls(
            config,
            session,
            device=device,
            max_context=max_context,
            num_speculative_tokens=num_speculative_tokens,
        )

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        num_speculative_tokens: int | None = None,
        ignore_eos: bool = False,
        stop_token_ids: Collection[int] = (),
    ) -> Iterator[Step]:
        """Greedy tokens after the prompt, a Step at a time, to a stop token (emitted), max_tokens or the window's end.

        max_tokens None means what the window leaves. Drafts never change the tokens, only how many come a step.
        Raises RequestError at once, not at the first step, for a request that cannot be served.
        """
        drafts = self.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        _check_drafts(drafts, self.num_speculative_tokens > 0)
        self._check_prompt(prompt_ids)
        room = self.max_context - len(prompt_ids)
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}, expected at least 1")
        limit = room if max_tokens is None else min(max_tokens, room)
        stops = frozenset(stop_token_ids) if ignore_eos else self.eos_token_ids | frozenset(stop_token_ids)
        self._generation += 1
        return self._steps(prompt_ids, limit, drafts, stops, self._generation)

    def _steps(
        self, prompt_ids: Sequence[int], limit: int, num_drafts: int, stops: frozenset[int], generation: int
    ) -> Iterator[Step]:
        """The loop: prefill, then draft, verify and commit until something ends it."""
        self._check_owner(generation)
        new, drafted, accepted = [self.session.prefill(prompt_ids)], 0, 0
        remaining = limit
        while True:
            token_ids = _until_stop(new[:remaining], stops)
            remaining -= len(token_ids)
            yield Step(token_ids, drafted, min(accepted, len(token_ids)))
            if remaining == 0 or token_ids[-1] in stops:
                return
            self._check_owner(generation)
            window_left = self.max_context - self.session.context_length - 1  # tokens that may still be emitted
            drafted = min(num_drafts, window_left - 1)
            new, accepted = self.session.step(drafted)

    def _check_owner(self, generation: int) -> None:
        if generation != self._generation:
            raise DecoderError("another generate() took over this decoder", "Finish one sequence before the next.")

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise RequestError("the prompt is empty", "Send at least one token.")
        if len(prompt_ids) >= self.max_context:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, the context holds {self.max_context} with the output",
                f"Send at most {self.max_context - 1} tokens.",
            )
        for position, token_id in enumerate(prompt_ids):
            if not 0 <= token_id < self.config.vocab_size:
                raise RequestError(f"prompt token {position} is {token_id}, expected 0 … {self.config.vocab_size - 1}")


def _until_stop(token_ids: Sequence[int], stops: frozenset[int]) -> tuple[int, ...]:
    """The tokens up to and with the first stop token."""
    for index, token_id in enumerate(token_ids):
        if token_id in stops:
            return tuple(token_ids[: index + 1])
    return tuple(token_ids)


def _check_drafts(num_speculative_tokens: int, has_mtp: bool) -> None:
    if not 0 <= num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
        raise RequestError(f"num_speculative_tokens is {num_speculative_tokens}, expected 0 … {MAX_SPECULATIVE_TOKENS}")
    if num_speculative_tokens and not has_mtp:
        raise RequestError(
            f"num_speculative_tokens is {num_speculative_tokens}, but no MTP head is loaded",
            "Use 0, or load a checkpoint with an MTP head and num_speculative_tokens above 0.",
        )


def _resolve_device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device is {device!r}, expected auto, cpu or cuda")
    if device == "auto":
        usable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
        return "cuda" if usable else "cpu"
    return device


def _cpu_session(
    checkpoint: Checkpoint,
    config: ModelConfig,
    max_context: int,
    num_speculative_tokens: int,
    dtype: torch.dtype | None,
    draft_vocabulary: DraftVocabulary | None,
    native: bool | None,
) -> Session:
    if dtype not in (None, torch.float32):
        raise RequestError(f"dtype is {dtype}, the CPU path computes in torch.float32")
    weights = load_weights(checkpoint, torch.float32, with_mtp=num_speculative_tokens > 0)
    library = native_library(native)
    if library is not None:
        return NativeSession(library, config, weights, max_context=max_context, draft_vocabulary=draft_vocabulary)
    return TorchSession(config, weights, max_context=max_context, device="cpu", draft_vocabulary=draft_vocabulary)


def _cuda_session(
    checkpoint: Checkpoint,
    config: ModelConfig,
    max_context: int,
    num_speculative_tokens: int,
    draft_vocabulary: DraftVocabulary | None,
) -> Session:
    from .cuda_session import CudaSession  # here, because a CPU installation has no triton

    return CudaSession.load(
        checkpoint,
        config,
        max_context=max_context,
        num_speculative_tokens=num_speculative_tokens,
        draft_vocabulary=draft_vocabulary,
    )
