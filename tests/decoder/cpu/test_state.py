"""After any pattern of accepts the whole state equals that of reading the same tokens in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from kernarc.decoder.cpu import cache
from kernarc.decoder.cpu.cache import DeltaNetState, KeyValueCache
from kernarc.decoder.cpu.session import TorchSession
from kernarc.decoder.generate import Decoder
from kernarc.decoder.native import state as native_state
from kernarc.decoder.native.session import NativeSession
from kernarc.decoder.native.state import NativeDeltaState, NativeKeyValueCache

from ...fakes.decoder_checkpoints import RandomCheckpoint
from ...fakes.draft_oracle import cpu_session, force_accepts, greedy_ids, prompt, torch_session
from .mtp_reference import MtpReference

# fp32 against fp32, of the largest value. Against fp64, over 40 prompts, both paths and transformers itself are off by
# a median of 4e-6 in the last layer, 2e-5 at worst; a nearly vanishing key amplifies that once in a hundred prompts.
TIGHT = 1e-4


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to TIGHT of the largest expected value; NaN is not near anything."""
    assert actual.shape == expected.shape
    worst = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert worst <= TIGHT, f"off by {worst:.1e} of the largest value"


class Reference:
    """transformers' cache and hidden states after reading tokens in order, and the MTP reference's keys and values."""

    def __init__(self, checkpoint: RandomCheckpoint) -> None:
        self.model: Any = checkpoint.reference()
        self.mtp = MtpReference(checkpoint.config, checkpoint.weights)

    @torch.inference_mode()
    def check(self, session: TorchSession | NativeSession, token_ids: Sequence[int]) -> None:
        """token_ids: every token emitted so far with the prompt, the last one unread."""
        assert session.context_length == len(token_ids) - 1
        read = torch.tensor([list(token_ids[:-1])])
        output = self.model.model(read, use_cache=True)
        layers = session.state.layers[: len(output.past_key_values.layers)]  # the MTP layer's may follow
        for layer, expected in zip(layers, output.past_key_values.layers, strict=True):
            if isinstance(layer, DeltaNetState | NativeDeltaState):
                assert_near(layer.recurrent, expected.recurrent_states[0][0])
                window = expected.conv_states[0][0].T[-layer.window.shape[0] :]
                assert_near(layer.window, window)
            else:
                check_cache(layer, session.context_length, expected.keys[0], expected.values[0])
        keys, values = self.mtp.keys_values(token_ids, output.last_hidden_state[0])
        length = session.mtp_length  # what the last step committed is read by the next draft
        assert length >= session.context_length - 9
        if length:
            check_cache(session.mtp_cache, length, keys[:, :length], values[:, :length])


def check_cache(
    held: KeyValueCache | NativeKeyValueCache, length: int, keys: torch.Tensor, values: torch.Tensor
) -> None:
    assert_near(held.keys[:, :length], keys)
    assert_near(held.values[:, :length], values)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Uninitialised memory is NaN, so that a read past the length shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def test_prefill_leaves_transformers_state(checkpoint: RandomCheckpoint, native: bool) -> None:
    decoder = Decoder.load(checkpoint.path, native=native)
    session = cpu_session(decoder)
    reference = Reference(checkpoint)
    for length in (1, 2, 3, 4, 64, 65, 129, 300):
        prompt_ids = prompt(length)
        first = session.prefill(prompt_ids)
        reference.check(session, [*prompt_ids, first])


@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_every_accept_count_rolls_back_exactly(
    base_checkpoint: RandomCheckpoint, native: bool, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#39273, vllm-xpu-kernels#544, rMLX#436: S, the conv window, both caches, after each step of every count."""
    decoder = Decoder.load(base_checkpoint.path, native=native)
    session = cpu_session(decoder)
    reference = Reference(base_checkpoint)
    prompt_ids = prompt(2 + num_drafts)
    ids = greedy_ids(decoder, prompt_ids, 100)
    accepts = [*range(num_drafts + 1), 0, num_drafts]
    force_accepts(monkeypatch, decoder, ids, len(prompt_ids), accepts)
    emitted = [session.prefill(prompt_ids)]
    for count in accepts:
        tokens, accepted = session.step(num_drafts)
        assert accepted == count
        emitted += tokens
        if count in (0, 1, num_drafts // 2, num_drafts):
            reference.check(session, [*prompt_ids, *emitted])
    assert emitted == ids[: len(emitted)]


def test_accept_patterns_on_every_shape(
    checkpoint: RandomCheckpoint, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder.load(checkpoint.path, native=native)
    session = cpu_session(decoder)
    prompt_ids = prompt(70)
    ids = greedy_ids(decoder, prompt_ids, 120)
    accepts = [0, 3, 1, 2, 0, 0, 3, 3, 2, 1]
    force_accepts(monkeypatch, decoder, ids, len(prompt_ids), accepts)
    emitted = [session.prefill(prompt_ids)]
    for count in accepts:
        tokens, accepted = session.step(3)
        assert accepted == count
        emitted += tokens
    Reference(checkpoint).check(session, [*prompt_ids, *emitted])


def test_two_hundred_steps_do_not_drift(
    base_checkpoint: RandomCheckpoint, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With caches that grow every few steps."""
    monkeypatch.setattr(cache, "SPARE", 3)
    monkeypatch.setattr(native_state, "SPARE", 3)
    decoder = Decoder.load(base_checkpoint.path, native=native)
    session = cpu_session(decoder)
    prompt_ids = prompt(5)
    ids = greedy_ids(decoder, prompt_ids, 520)
    accepts = [(7 * i) % 4 for i in range(200)]
    force_accepts(monkeypatch, decoder, ids, len(prompt_ids), accepts)
    emitted = [session.prefill(prompt_ids)]
    for _ in accepts:
        emitted += session.step(3)[0]
    assert emitted == ids[: len(emitted)]
    Reference(base_checkpoint).check(session, [*prompt_ids, *emitted])


def test_hidden_states_and_logits_equal_transformers(checkpoint: RandomCheckpoint) -> None:
    """At prefill and, row by row, in a verify after it."""
    session = torch_session(Decoder.load(checkpoint.path, native=False))
    reference: Any = checkpoint.reference()
    token_ids = torch.tensor(prompt(109))
    with torch.inference_mode():
        expected_hidden = reference.model(token_ids[None], use_cache=False).last_hidden_state[0]
        expected_logits = reference(token_ids[None], use_cache=False).logits[0]
        session.state.reset(100)
        hidden = session.model.forward(token_ids[:100], session.state, 0)
        session.state.commit(100)
        verified = session.model.forward(token_ids[100:], session.state, 100)
    hidden = torch.cat([hidden, verified])
    assert_near(hidden, expected_hidden)
    assert_near(session.model.logits(hidden), expected_logits)
