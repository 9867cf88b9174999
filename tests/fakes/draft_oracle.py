"""Drafts with a chosen fate: right up to a place, then wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import pytest
import torch
from kernarc.decoder.cpu.session import TorchSession
from kernarc.decoder.generate import Decoder
from kernarc.decoder.native.session import NativeSession


def prompt(length: int, vocab_size: int = 211, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


def greedy_ids(decoder: Decoder, prompt_ids: Sequence[int], max_tokens: int, num_drafts: int = 0) -> list[int]:
    """Ids of a whole run without stop tokens."""
    steps = decoder.generate(prompt_ids, max_tokens=max_tokens, num_speculative_tokens=num_drafts, ignore_eos=True)
    return [token_id for step in steps for token_id in step.token_ids]


def cpu_session(decoder: Decoder) -> TorchSession | NativeSession:
    """The decoder's session, known to be one of the two that run on a CPU."""
    assert isinstance(decoder.session, TorchSession | NativeSession)
    return decoder.session


def torch_session(decoder: Decoder) -> TorchSession:
    """The decoder's session, known to be the plain PyTorch one."""
    assert isinstance(decoder.session, TorchSession)
    return decoder.session


def native_session(decoder: Decoder) -> NativeSession:
    """The decoder's session, known to be the compiled one."""
    assert isinstance(decoder.session, NativeSession)
    return decoder.session


def force_accepts(
    patch: pytest.MonkeyPatch, decoder: Decoder, ids: Sequence[int], num_prompt: int, accepts: Sequence[int]
) -> None:
    """Let step i accept accepts[i] drafts, later steps all: the real head drafts, then its guesses are replaced.

    ids: what greedy decoding emits after a prompt of `num_prompt` tokens, long enough for every draft.
    """
    session = cpu_session(decoder)
    real_draft = session.draft
    fates: Iterator[int] = chain(accepts, repeat(len(ids)))

    def draft(num_drafts: int) -> list[int]:
        assert len(real_draft(num_drafts)) == num_drafts
        emitted = session.context_length - num_prompt + 1
        drafts = list(ids[emitted : emitted + num_drafts])
        assert len(drafts) == num_drafts, "the oracle needs more ids"
        accepted = next(fates)
        if accepted < num_drafts:
            drafts[accepted] = (drafts[accepted] + 1) % decoder.config.vocab_size
        return drafts

    patch.setattr(session, "draft", draft)
