"""Draft windows and contexts: the same output, and drafts by the definition with what the head was given to read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.cpu import session as plain_session
from kernarc.decoder.cpu.session import TorchSession
from kernarc.decoder.draft_context import CPU_DRAFT_CONTEXT, DraftReading, cpu_window, first_position, resolve_reading
from kernarc.decoder.errors import RequestError
from kernarc.decoder.generate import Decoder
from kernarc.decoder.native.session import NativeSession

from ..fakes.decoder_checkpoints import RandomCheckpoint
from ..fakes.draft_oracle import cpu_session, greedy_ids, prompt
from .conftest import require_compiler
from .cpu.mtp_reference import MtpReference

# (window, context): either longer than the other, than a prompt, than a block of 64 keys
READINGS: list[tuple[int | str, int | str]] = [
    *(("all", 0), ("all", 1), ("all", 7), ("all", 1000), (0, "all"), (1, 1)),
    *((64, 64), (131, 20), (20, 131), (65, 0), (1000, 64)),
]


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
def test_output_is_the_same_whatever_the_head_reads(checkpoint: RandomCheckpoint, native: bool, length: int) -> None:
    """Every number of drafts, against a head that reads the whole prompt and a model without one."""
    alone = Decoder.load(checkpoint.path, native=native, num_speculative_tokens=0)
    ids = greedy_ids(alone, prompt(length), 24)
    whole = Decoder.load(checkpoint.path, native=native, draft_window="all", draft_context="all")
    assert greedy_ids(whole, prompt(length), 24) == ids
    for place, (window, context) in enumerate(READINGS):
        decoder = Decoder.load(checkpoint.path, native=native, draft_window=window, draft_context=context)
        for num_drafts in {place % 9, 8 - place % 9, 3}:
            assert greedy_ids(decoder, prompt(length), 24, num_drafts) == ids, (window, context, num_drafts)


@pytest.mark.parametrize(("window", "context"), READINGS)
def test_drafts_equal_the_definition_over_what_was_read(
    checkpoint: RandomCheckpoint, native: bool, window: int | str, context: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' states: finished for the last `context` positions, without the last mixer before them; the head
    turns keys and queries alike, so that to it a prompt may as well begin where the window does."""
    session = cpu_session(
        Decoder.load(checkpoint.path, native=native, draft_window=window, draft_context=context, max_context=200)
    )
    read_in_chunks(monkeypatch, session, 48)
    drafted = record_drafts(monkeypatch, session)
    reference: Any = checkpoint.reference()
    mtp = MtpReference(checkpoint.config, checkpoint.weights)
    for length in (1, 2, 70):
        tokens = prompt(length)
        unseen, unfinished = (
            0 if count == "all" else max(0, length - max(1, int(count))) for count in (window, context)
        )
        tokens.append(session.prefill(tokens))
        for _ in range(3):
            with torch.inference_mode():
                read = reference.model(torch.tensor([tokens[:-1]]), use_cache=False, output_hidden_states=True)
                hidden = read.last_hidden_state[0].clone()
                x, last = read.hidden_states[-2][0, :unfinished], reference.model.layers[-1]
                hidden[:unfinished] = reference.model.norm(x + last.mlp(last.post_attention_layernorm(x)))
            expected = mtp.drafts(tokens[unseen:], hidden[unseen:], 4)
            tokens += session.step(4)[0]
            assert drafted[-1] == expected


@pytest.mark.parametrize(
    ("unseen", "unfinished"),
    [(0, 400), (1, 1), (0, 512), (400, 513), (511, 512), (512, 512), (513, 767), (600, 768), (768, 769), (899, 899)],
)
def test_both_paths_draft_alike_at_chunk_borders(
    base_checkpoint: RandomCheckpoint, unseen: int, unfinished: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """900 tokens, in chunks of 512 in PyTorch and of 768 in C++."""
    require_compiler()
    options = {"draft_window": 900 - unseen, "draft_context": 900 - unfinished}
    plain, native = (
        cpu_session(Decoder.load(base_checkpoint.path, native=native, **options)) for native in (False, True)
    )
    assert decode(monkeypatch, plain, prompt(900)) == decode(monkeypatch, native, prompt(900))
    assert plain.mtp_origin == native.mtp_origin == unseen


def test_what_is_longer_than_the_prompt_changes_no_bit(
    checkpoint: RandomCheckpoint, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []
    for count in ("all", 90, 91, 4000):
        decoder = Decoder.load(checkpoint.path, native=native, draft_window=count, draft_context=count)
        session = cpu_session(decoder)
        held.append((decode(monkeypatch, session, prompt(90)), session.mtp_cache.keys[:, : session.mtp_length].clone()))
    for decoded, keys in held[1:]:
        assert decoded == held[0][0]
        assert torch.equal(keys, held[0][1])


def test_keys_of_the_head_are_those_it_may_see(checkpoint: RandomCheckpoint, native: bool) -> None:
    """From position 30 on; those before 60 of unfinished states, so other ones than where all is finished."""
    whole, shorter = (
        cpu_session(Decoder.load(checkpoint.path, native=native, draft_window=window, draft_context=context))
        for window, context in (("all", "all"), (60, 30))
    )
    for session in (whole, shorter):
        session.prefill(prompt(90))
        assert session.mtp_length == 89
    assert (whole.mtp_origin, shorter.mtp_origin) == (0, 30)
    all_keys, keys = whole.mtp_cache.keys[:, 30:89], shorter.mtp_cache.keys[:, :59]
    assert not torch.isclose(all_keys[:, :30], keys[:, :30]).all(-1).any()
    assert torch.allclose(all_keys[:, 30:], keys[:, 30:], atol=1e-4, rtol=1e-4)


def test_caches_of_a_window_grow(base_checkpoint: RandomCheckpoint, native: bool) -> None:
    """1,000 positions, read from 990 on: the caches move as the text goes on, and so does a second, shorter prompt."""
    decoder = Decoder.load(base_checkpoint.path, native=native, draft_window=10, draft_context=4)
    for length in (960, 33, 500):
        ids = greedy_ids(decoder, prompt(length), 60)
        assert greedy_ids(decoder, prompt(length), 60, 5) == ids


def test_the_last_positions_of_a_prompt() -> None:
    assert [first_position(1100, count) for count in (None, 1100, 2000, 200, 1, 0)] == [0, 0, 0, 900, 1099, 1099]
    assert first_position(1, 0) == 0


def test_what_a_device_takes(base_checkpoint: RandomCheckpoint) -> None:
    config = ModelConfig.from_dict(base_checkpoint.config)
    assert resolve_reading(None, None, "cpu", config) == DraftReading(cpu_window(config), CPU_DRAFT_CONTEXT)
    assert resolve_reading("all", "all", "cpu", config) == DraftReading(None, None)
    assert resolve_reading(0, 7, "cpu", config) == DraftReading(0, 7)
    for asked in (None, "all"):
        assert resolve_reading(asked, asked, "cuda", config) == DraftReading(None, None)
    with pytest.raises(RequestError, match="draft window is 64, but on a card the MTP head reads the whole prompt"):
        resolve_reading(64, None, "cuda", config)
    with pytest.raises(RequestError, match="draft context is 0, but on a card"):
        resolve_reading(None, 0, "cuda", config)
    for wrong in (-1, "some"):
        for device in ("cpu", "cuda"):
            with pytest.raises(RequestError, match=f"draft context is {wrong!r}, expected all or at least 0 prompt"):
                resolve_reading(None, wrong, device, config)


def test_the_window_grows_with_the_weights_of_a_draft(base_checkpoint: RandomCheckpoint) -> None:
    """1,024 positions of two heads of 16 are 65,536 keys and values; a fifth of the weights may be more."""
    shape = base_checkpoint.config
    assert cpu_window(ModelConfig.from_dict(shape)) == 1024
    large = {**shape, "vocab_size": 10_000, "hidden_size": 1024, "intermediate_size": 2048}
    weights = 10_000 * 1024 + 1024 * 1024 + 3 * 1024 * 2048 + (3 * 4 + 2 * 2) * 16 * 1024
    assert cpu_window(ModelConfig.from_dict(large)) == weights // 5 // (2 * 2 * 16)


def test_a_wrong_window_is_refused_at_load(base_checkpoint: RandomCheckpoint) -> None:
    with pytest.raises(RequestError, match="draft window is -5"):
        Decoder.load(base_checkpoint.path, device="cpu", draft_window=-5)
