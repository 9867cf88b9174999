"""Adaptive draft length: the best number for a known acceptance, found again after it changed; output unchanged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from kernarc.decoder import draft_length
from kernarc.decoder.checkpoint.synthetic import TokenCycle, write_structured_checkpoint
from kernarc.decoder.cpu.session import TorchSession
from kernarc.decoder.draft_length import AdaptiveLength, measure_step_ms, timed_tokens
from kernarc.decoder.errors import RequestError
from kernarc.decoder.generate import AUTO_COUNTS, Decoder, Step
from kernarc.decoder.session import SessionOptions, _check_dtypes

from ..fakes.decoder_checkpoints import RandomCheckpoint

CARD_MS = {0: 7.0, 1: 8.1, 2: 8.9, 3: 9.7, 4: 10.5, 6: 12.1, 8: 13.7}  # a step, and 0.8 a draft


def best(acceptance: float, step_ms: dict[int, float]) -> int:
    """By the formula, for independent drafts."""
    return max(step_ms, key=lambda count: sum(acceptance**i for i in range(count + 1)) / step_ms[count])


def run(length: AdaptiveLength, acceptance: float, steps: int, rng: random.Random) -> list[int]:
    chosen = []
    for _ in range(steps):
        count = length.choose()
        accepted = 0
        while accepted < count and rng.random() < acceptance:
            accepted += 1
        length.observe(count, accepted)
        chosen.append(count)
    return chosen


@pytest.mark.parametrize("acceptance", [0.02, 0.5, 0.87, 0.99])
def test_it_settles_near_the_best_number(acceptance: float) -> None:
    chosen = run(AdaptiveLength(CARD_MS, 3), acceptance, 3000, random.Random(1))[1000:]
    speed = [sum(acceptance**i for i in range(count + 1)) / CARD_MS[count] for count in chosen]
    ideal = best(acceptance, CARD_MS)
    ideal_speed = sum(acceptance**i for i in range(ideal + 1)) / CARD_MS[ideal]
    assert sum(speed) / len(speed) > 0.93 * ideal_speed


def test_it_follows_a_change() -> None:
    length, rng = AdaptiveLength(CARD_MS, 3), random.Random(2)
    low, high, low_again = (run(length, acceptance, 600, rng)[-200:] for acceptance in (0.05, 0.98, 0.05))
    assert sum(low) / 200 < 1.5
    assert sum(high) / 200 > 6
    assert sum(low_again) / 200 < 1.5


def test_positions_beyond_the_first_wrong_draft_say_nothing() -> None:
    length = AdaptiveLength({0: 1.0, 4: 1.0}, 4)
    for _ in range(200):
        length.observe(4, 1)
    first, second, third, _ = length.acceptance()
    assert first > 0.95
    assert second < 0.12
    assert third < second + 0.02  # never tried: thought as good as the one before


def test_the_clock_is_read_around_steps() -> None:
    calls: list[tuple[str, int]] = []

    class Recorded:
        def prefill(self, prompt_ids: object) -> int:
            calls.append(("prefill", len(prompt_ids)))  # type: ignore[arg-type]
            return 0

        def step(self, num_drafts: int) -> tuple[list[int], int]:
            calls.append(("step", num_drafts))
            return [0], 0

    step_ms = measure_step_ms(Recorded(), (0, 3), prompt_tokens=5)
    assert list(step_ms) == [0, 3]
    assert all(0 <= ms < 1000 for ms in step_ms.values())
    assert calls == [("prefill", 5), *[("step", 0)] * 3, *[("step", 3)] * 3] * 6
    assert timed_tokens((0, 3)) == 3 * (1 + 4) + 3


def test_a_busy_moment_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps = [0.0], [0]

    class Disturbed:
        def prefill(self, prompt_ids: object) -> int:
            return 0

        def step(self, num_drafts: int) -> tuple[list[int], int]:
            steps[0] += 1
            now[0] += (1 + num_drafts) / 1e3 + (0.5 if 8 < steps[0] < 20 else 0)
            return [0], 0

    monkeypatch.setattr(draft_length.time, "perf_counter", lambda: now[0])
    assert measure_step_ms(Disturbed(), (0, 3), prompt_tokens=5) == pytest.approx({0: 1.0, 3: 4.0})


def ids(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


@pytest.mark.parametrize("most", [2, 5])
def test_a_card_that_holds_fewer_drafts_is_never_asked_for_more(
    most: int, base_checkpoint: RandomCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchSession, "max_drafts", most, raising=False)
    auto = Decoder.load(base_checkpoint.path, device="cpu", num_speculative_tokens="auto", native=False)
    assert auto.step_ms is not None
    assert tuple(auto.step_ms) == tuple(count for count in AUTO_COUNTS if count <= most)
    steps = list(auto.generate([5, 77, 140], max_tokens=60, ignore_eos=True))
    assert max(step.drafted for step in steps) <= most
    with pytest.raises(RequestError, match=f"num_speculative_tokens is 8, a step holds {most}"):
        auto.generate([5, 77, 140], max_tokens=8, num_speculative_tokens=8)


@pytest.mark.parametrize("native", [False, None])
def test_output_is_unchanged(native: bool | None, base_checkpoint: RandomCheckpoint) -> None:
    auto = Decoder.load(base_checkpoint.path, device="cpu", num_speculative_tokens="auto", native=native)
    assert auto.step_ms is not None
    assert tuple(auto.step_ms) == AUTO_COUNTS
    steps = list(auto.generate([5, 77, 140], max_tokens=120, ignore_eos=True))
    fixed = list(auto.generate([5, 77, 140], max_tokens=120, ignore_eos=True, num_speculative_tokens=3))
    assert ids(steps) == ids(fixed)
    assert {step.drafted for step in fixed[1:-1]} == {3}


def test_it_chooses_among_the_steps_of_a_real_decoder(tmp_path: Path) -> None:
    write_structured_checkpoint("tiny", tmp_path / "always", acceptance=1.0)
    decoder = Decoder.load(tmp_path / "always", device="cpu", num_speculative_tokens="auto", max_context=1024)
    decoder.step_ms = dict.fromkeys(AUTO_COUNTS, 1.0)  # as if drafts were free
    steps = list(decoder.generate([5, 900], max_tokens=400, ignore_eos=True))
    assert ids(steps) == TokenCycle.make(2048, 1.0, 0).continuation(900, 400)
    assert [step.drafted for step in steps[10:-1]] == [8] * (len(steps) - 11)


def test_a_small_window_keeps_the_default(base_checkpoint: RandomCheckpoint) -> None:
    decoder = Decoder.load(base_checkpoint.path, device="cpu", num_speculative_tokens="auto", max_context=40)
    assert (decoder.step_ms, decoder.num_speculative_tokens) == (None, 3)
    assert len(ids(list(decoder.generate([5], max_tokens=20, ignore_eos=True)))) == 20


def test_settings_that_cannot_be_are_refused(base_checkpoint: RandomCheckpoint) -> None:
    for options, said in (
        ({"num_speculative_tokens": "many"}, "'many', expected 0 … 8 or auto"),
        ({"quantize": "fp8"}, "neither quantises"),
        ({"prefill_dtype": "fp8"}, "neither quantises"),
        ({"quantize": "int4"}, "expected fp8"),
        ({"prefill_dtype": "fp16"}, "expected bf16 or fp8"),
    ):
        with pytest.raises(RequestError, match=said):
            Decoder.load(base_checkpoint.path, device="cpu", **options)
    with pytest.raises(RequestError, match="was not loaded to choose"):
        Decoder.load(base_checkpoint.path, device="cpu").generate([1], num_speculative_tokens="auto")


def test_a_dtype_on_a_card_is_refused_rather_than_ignored() -> None:
    with pytest.raises(RequestError, match=r"dtype is torch\.bfloat16, but the CUDA kernels fix their own"):
        _check_dtypes(SessionOptions(dtype=torch.bfloat16), "cuda")
    _check_dtypes(SessionOptions(quantize="fp8", prefill_dtype="fp8"), "cuda")
