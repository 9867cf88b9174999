"""A shorter draft context: the same output, and drafts by the definition with what the head was given to read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernarc.decoder import session as plain_session
from kernarc.decoder.draft_context import CPU_DRAFT_CONTEXT, resolve_draft_context, skipped_rows
from kernarc.decoder.errors import RequestError
from kernarc.decoder.generate import Decoder
from kernarc.decoder.native.session import NativeSession
from kernarc.decoder.session import TorchSession

from .checkpoints import RandomCheckpoint
from .conftest import require_compiler
from .mtp_reference import MtpReference
from .oracle import cpu_session, greedy_ids, prompt

CONTEXTS = (0, 1, 7, 64, 131, 1000)


def read_in_chunks(patch: pytest.MonkeyPatch, session: TorchSession | NativeSession, rows: int) -> None:
    """Prompts are read by so many rows a forward, whatever the session."""
    if isinstance(session, NativeSession):
        patch.setattr(session, "_prefill_rows", rows)
    else:
        patch.setattr(plain_session, "PREFILL_ROWS", rows)


def record_drafts(patch: pytest.MonkeyPatch, session: TorchSession | NativeSession) -> list[list[int]]:
    """What the session will draft, step by step."""
    drafted: list[list[int]] = []
    real_draft = session.draft

    def draft(num_drafts: int) -> list[int]:
        drafted.append(real_draft(num_drafts))
        return drafted[-1]

    patch.setattr(session, "draft", draft)
    return drafted


def decode(patch: pytest.MonkeyPatch, session: TorchSession | NativeSession, prompt_ids: list[int]) -> list[Any]:
    """The first token, five steps of five drafts, and what was drafted."""
    drafted = record_drafts(patch, session)
    return [session.prefill(prompt_ids), [session.step(5) for _ in range(5)], drafted]


@pytest.mark.parametrize("length", [1, 2, 47, 64, 130, 300])
def test_output_is_the_same_for_every_context(checkpoint: RandomCheckpoint, native: bool, length: int) -> None:
    """Every number of drafts, against a head that reads the whole prompt and a model without one."""
    alone = Decoder.load(checkpoint.path, native=native, num_speculative_tokens=0)
    ids = greedy_ids(alone, prompt(length), 24)
    whole = Decoder.load(checkpoint.path, native=native, draft_context="all")
    assert greedy_ids(whole, prompt(length), 24) == ids
    for place, context in enumerate(CONTEXTS):
        decoder = Decoder.load(checkpoint.path, native=native, draft_context=context)
        for num_drafts in {place, 8 - place, 3}:
            assert greedy_ids(decoder, prompt(length), 24, num_drafts) == ids, (context, num_drafts)


@pytest.mark.parametrize("context", CONTEXTS)
def test_drafts_equal_the_definition_over_what_was_read(
    checkpoint: RandomCheckpoint, native: bool, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' states: finished for the last `context` positions, without the last mixer before them."""
    session = cpu_session(Decoder.load(checkpoint.path, native=native, draft_context=context))
    read_in_chunks(monkeypatch, session, 48)
    drafted = record_drafts(monkeypatch, session)
    reference: Any = checkpoint.reference()
    mtp = MtpReference(checkpoint.config, checkpoint.weights)
    for length in (1, 2, 70):
        tokens = prompt(length)
        unfinished = max(0, length - max(1, context))
        tokens.append(session.prefill(tokens))
        for _ in range(3):
            with torch.inference_mode():
                read = reference.model(torch.tensor([tokens[:-1]]), use_cache=False, output_hidden_states=True)
                hidden = read.last_hidden_state[0].clone()
                x, last = read.hidden_states[-2][0, :unfinished], reference.model.layers[-1]
                hidden[:unfinished] = reference.model.norm(x + last.mlp(last.post_attention_layernorm(x)))
            expected = mtp.drafts(tokens, hidden, 4)
            tokens += session.step(4)[0]
            assert drafted[-1] == expected


@pytest.mark.parametrize("unfinished", [0, 1, 400, 511, 512, 513, 767, 768, 769, 899])
def test_both_paths_draft_alike_at_chunk_borders(
    base_checkpoint: RandomCheckpoint, unfinished: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """900 tokens, in chunks of 512 in PyTorch and of 768 in C++."""
    require_compiler()
    plain, native = (
        cpu_session(Decoder.load(base_checkpoint.path, native=native, draft_context=900 - unfinished))
        for native in (False, True)
    )
    assert decode(monkeypatch, plain, prompt(900)) == decode(monkeypatch, native, prompt(900))


def test_a_context_longer_than_the_prompt_changes_no_bit(
    checkpoint: RandomCheckpoint, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []
    for context in ("all", 90, 91, 4000):
        session = cpu_session(Decoder.load(checkpoint.path, native=native, draft_context=context))
        held.append((decode(monkeypatch, session, prompt(90)), session.mtp_cache.keys[:, : session.mtp_length].clone()))
    for decoded, keys in held[1:]:
        assert decoded == held[0][0]
        assert torch.equal(keys, held[0][1])


def test_a_shorter_context_is_seen_by_the_head_alone(checkpoint: RandomCheckpoint, native: bool) -> None:
    """The target's state has the same bits; the head's keys differ where they should, and only there."""
    sessions = [
        cpu_session(Decoder.load(checkpoint.path, native=native, draft_context=context)) for context in ("all", 30)
    ]
    for session in sessions:
        session.prefill(prompt(90))
    whole, shorter = (session.mtp_cache.keys[:, :89] for session in sessions)
    assert not torch.isclose(whole[:, :60], shorter[:, :60]).all(-1).any()
    assert torch.allclose(whole[:, 60:], shorter[:, 60:], atol=1e-4, rtol=1e-4)
    steps = [session.step(0) for session in sessions]
    assert steps[0] == steps[1]


def test_rows_left_out_by_chunk() -> None:
    assert [skipped_rows(start, 512, 1100, 200) for start in (0, 512, 1024)] == [512, 388, 0]
    assert skipped_rows(1024, 76, 1100, 0) == skipped_rows(1024, 76, 1100, 1) == 75, "the last row is never left out"
    assert skipped_rows(0, 1, 1, 0) == 0
    assert skipped_rows(0, 512, 1100, None) == 0


def test_what_a_device_takes() -> None:
    assert resolve_draft_context(None, "cpu") == CPU_DRAFT_CONTEXT
    assert resolve_draft_context("all", "cpu") is None
    assert resolve_draft_context(0, "cpu") == 0
    assert resolve_draft_context(None, "cuda") is None
    assert resolve_draft_context("all", "cuda") is None
    with pytest.raises(RequestError, match="draft context is 64, but on a card every position of a prompt is finished"):
        resolve_draft_context(64, "cuda")
    for wrong in (-1, "some"):
        for device in ("cpu", "cuda"):
            with pytest.raises(RequestError, match=f"draft context is {wrong!r}, expected all or at least 0 prompt"):
                resolve_draft_context(wrong, device)


def test_a_wrong_context_is_refused_at_load(base_checkpoint: RandomCheckpoint) -> None:
    with pytest.raises(RequestError, match="draft context is -5"):
        Decoder.load(base_checkpoint.path, device="cpu", draft_context=-5)
