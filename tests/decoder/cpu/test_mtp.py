"""The MTP head's drafts against the recursive definition, and acceptance where it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernarc.decoder.checkpoint.synthetic import write_structured_checkpoint
from kernarc.decoder.generate import Decoder

from ...fakes.decoder_checkpoints import RandomCheckpoint
from ...fakes.draft_oracle import cpu_session, greedy_ids, prompt
from .mtp_reference import MtpReference


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_drafts_equal_the_recursive_definition(
    checkpoint: RandomCheckpoint, native: bool, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step's drafts, through accepts and rejections (MTPLX#176: norms with their + 1)."""
    decoder = Decoder.load(checkpoint.path, native=native)
    session = cpu_session(decoder)
    reference: Any = checkpoint.reference()
    mtp = MtpReference(checkpoint.config, checkpoint.weights)
    drafted: list[list[int]] = []
    real_draft = session.draft

    def draft(num_drafts: int) -> list[int]:
        drafted.append(real_draft(num_drafts))
        return drafted[-1]

    monkeypatch.setattr(session, "draft", draft)
    for length in (1, 2, 70):
        tokens = prompt(length)
        tokens.append(session.prefill(tokens))
        for _ in range(4):
            with torch.inference_mode():
                hidden = reference.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
            new, accepted = session.step(num_drafts)
            expected = mtp.drafts(tokens, hidden, num_drafts)
            assert drafted[-1] == expected
            right = [draft == token for draft, token in zip(expected, [*new, -1], strict=False)]
            assert accepted == (right.index(False) if False in right else num_drafts)
            tokens += new


@pytest.mark.parametrize(
    ("acceptance", "max_tokens", "low", "high"), [(1.0, 101, 4.0, 4.0), (0.87, 401, 2.95, 3.65), (0.0, 41, 1.0, 1.0)]
)
def test_acceptance_on_a_structured_checkpoint(
    tmp_path: Path, acceptance: float, max_tokens: int, low: float, high: float
) -> None:
    """MTPLX#176: 1 + p + p² + p³ tokens a step for k = 3, which is 4, 3.28 and 1."""
    write_structured_checkpoint("tiny", tmp_path / "model", acceptance=acceptance)
    decoder = Decoder.load(tmp_path / "model", max_context=2048)
    ids = greedy_ids(decoder, prompt(40), max_tokens)
    steps = list(decoder.generate(prompt(40), max_tokens=max_tokens, ignore_eos=True))[1:]
    assert [token for step in steps for token in step.token_ids] == ids[1:]
    assert low <= sum(len(step.token_ids) for step in steps[:-1]) / (len(steps) - 1) <= high
