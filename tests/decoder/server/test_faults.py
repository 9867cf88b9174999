"""Each test plant does what it says, repeatably, and nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from kernarc.decoder.checkpoint.synthetic import TokenCycle, write_structured_checkpoint
from kernarc.decoder.errors import RequestError
from kernarc.decoder.generate import Decoder, Step
from kernarc.decoder.server.fault_kinds import PLANTS, parse_plants, plant_help
from kernarc.decoder.server.faults import PlantedDecoder, need_plain_session, plant_faults
from kernarc.decoder.server.worker import StepSource

from ...fakes.live_server import ScriptedDecoder

CYCLE = TokenCycle.make(2048, 0.87, 0)
STEPS = [[1], *([[10 + place, 20 + place, 30 + place] for place in range(400)])]
CLEAN = list(itertools.chain.from_iterable(STEPS))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plants") / "tiny"
    write_structured_checkpoint("tiny", out)
    return out


def planted(**plants: float) -> PlantedDecoder:
    return PlantedDecoder(ScriptedDecoder(STEPS), plants, vocab_size=2048, seed=1)


def run(decoder: StepSource, max_tokens: int = 600, prompt: tuple[int, ...] = (5, 900)) -> list[Step]:
    return list(decoder.generate(prompt, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=()))


def flat(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def test_wrong_tokens_at_the_rate_asked_for() -> None:
    tokens = flat(run(planted(wrong_token=0.1)))
    wrong = sum(token != clean for token, clean in zip(tokens, CLEAN, strict=False))
    assert len(tokens) == 600
    assert 35 <= wrong <= 90
    assert tokens == flat(run(planted(wrong_token=0.1)))
    assert tokens != flat(run(planted(wrong_token=0.1), prompt=(6,)))


def test_dropped_tokens_leave_the_length() -> None:
    tokens = flat(run(planted(drop_token=0.1)))
    assert len(tokens) == 600
    left = iter(CLEAN)
    assert all(token in left for token in tokens)  # a subsequence
    assert tokens != CLEAN[:600]


def test_truncated_output() -> None:
    assert flat(run(planted(truncate=16))) == CLEAN[:16]


def test_a_step_delay_is_a_fraction_of_each_step() -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            self.now += 0.001
            return self.now

    clock, inner = Clock(), ScriptedDecoder(STEPS)
    real = inner.generate

    def slow(*arguments: object, **options: object):  # type: ignore[no-untyped-def]
        for step in real(*arguments, **options):  # type: ignore[arg-type]
            clock.now += 10.0
            yield step

    inner.generate = slow  # type: ignore[method-assign]
    decoder = PlantedDecoder(inner, {"step_delay": 0.05}, vocab_size=2048, seed=0, clock=clock)
    ends = [clock.now for _ in decoder.generate([1], max_tokens=30, ignore_eos=True, stop_token_ids=[])]
    assert ends[0] == pytest.approx(10.0, abs=0.1)  # the prefill is no step
    assert [b - a for a, b in itertools.pairwise(ends)] == pytest.approx([10.5] * 10, abs=0.1)


def test_no_plant_is_the_decoder_itself(tiny: Path) -> None:
    decoder = Decoder.load(tiny, device="cpu", max_context=64)
    assert plant_faults(decoder, [], seed=0) is decoder


def from_tiny(tiny: Path, *plants: str, max_context: int = 1024) -> StepSource:
    native = False if need_plain_session(plants) else None
    return plant_faults(Decoder.load(tiny, device="cpu", max_context=max_context, native=native), plants, seed=2)


def test_rejected_drafts_change_the_steps_and_not_the_text(tiny: Path) -> None:
    clean, spoilt = run(from_tiny(tiny), 200), run(from_tiny(tiny, "reject_drafts=0.3"), 200)
    assert flat(spoilt) == flat(clean) == CYCLE.continuation(900, 200)
    assert len(spoilt) > 1.3 * len(clean)
    assert all(step.drafted == 3 for step in spoilt[1:-3])


def test_sampled_output_is_not_greedy(tiny: Path) -> None:
    sampled = flat(run(from_tiny(tiny, "sampled"), 100))
    assert len(sampled) == 100
    wrong = sum(CYCLE.next[token] != after for token, after in itertools.pairwise(sampled))
    assert wrong > 5
    assert sampled == flat(run(from_tiny(tiny, "sampled"), 100))


@pytest.mark.parametrize("plant", ["wrong_scale", "nan"])
def test_a_broken_weight_breaks_the_output(tiny: Path, plant: str) -> None:
    assert flat(run(from_tiny(tiny, plant), 50)) != CYCLE.continuation(900, 50)


@pytest.mark.parametrize("plant", ["stale_kv=64", "shifted_position=3"])
def test_a_fault_of_the_cache_changes_logits(tiny: Path, plant: str) -> None:
    """The structured output hides it, so the hidden states are compared."""
    prompt = tuple(range(300))
    watches: list[list[torch.Tensor]] = []
    for plants in ([], [plant]):
        decoder = Decoder.load(tiny, device="cpu", max_context=1024, native=False)
        source, seen = plant_faults(decoder, plants, seed=0), list[torch.Tensor]()
        real = decoder.session.model.logits  # type: ignore[attr-defined]

        def watched(hidden: torch.Tensor, real: Any = real, seen: list[torch.Tensor] = seen) -> Any:
            seen.append(hidden)
            return real(hidden)

        decoder.session.model.logits = watched  # type: ignore[attr-defined]
        run(source, 6, prompt)
        watches.append(seen)
    clean, faulty = watches
    assert (clean[0] == faulty[0]).all()  # the prefill is right
    assert not (clean[-1] == faulty[-1]).all()


def test_a_plant_in_the_model_is_refused_where_it_would_do_nothing(tiny: Path, native: bool) -> None:
    decoder = Decoder.load(tiny, device="cpu", max_context=64, native=native)
    if native:
        with pytest.raises(RequestError, match="test plant nan needs the plain PyTorch session"):
            plant_faults(decoder, ["nan"], seed=0)
    else:
        assert plant_faults(decoder, ["nan"], seed=0) is decoder


def test_plants_are_parsed_and_explained() -> None:
    assert parse_plants(["step_delay", "wrong_token=0.5"]) == {"step_delay": 0.05, "wrong_token": 0.5}
    assert all(name in plant_help() for name in PLANTS)
    for text, said in (
        ("typo=1", "no test plant 'typo'"),
        ("nan=x", "'x' is not a number"),
        ("wrong_token=2", "0 … 1"),
    ):
        with pytest.raises(RequestError, match=said):
            parse_plants([text])
