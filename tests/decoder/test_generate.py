"""Speculative decoding changes how many tokens come a step, never which ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kernarc.decoder.cpu import gated_delta_net, session
from kernarc.decoder.errors import DecoderError, RequestError
from kernarc.decoder.generate import Decoder, Step
from transformers import Qwen3_5ForCausalLM

from ..fakes.decoder_checkpoints import RandomCheckpoint, write_checkpoint
from ..fakes.draft_oracle import force_accepts, greedy_ids, prompt


@pytest.fixture(scope="module")
def decoder(base_checkpoint: RandomCheckpoint, native: bool) -> Decoder:
    return Decoder.load(base_checkpoint.path, device="cpu", native=native)


def run(decoder: Decoder, prompt_ids: list[int], **options: object) -> list[Step]:
    return list(decoder.generate(prompt_ids, **options))  # type: ignore[arg-type]


def flat(steps: list[Step]) -> list[int]:
    return [token_id for step in steps for token_id in step.token_ids]


@torch.inference_mode()
def transformers_choices(checkpoint: RandomCheckpoint, prompt_ids: list[int], ids: list[int]) -> list[int]:
    """transformers' greedy choice at every output position, given the ids before it: equal to ids ⇔ same greedy run."""
    logits = checkpoint.reference()(torch.tensor([prompt_ids + ids]), use_cache=False).logits[0]
    choices: list[int] = logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist()
    return choices


def test_ids_equal_transformers_at_odd_prompt_lengths(checkpoint: RandomCheckpoint, native: bool) -> None:
    decoder = Decoder.load(checkpoint.path, device="cpu", native=native)
    for length in (1, 2, 3, 17, 63, 64, 65, 129, 300):
        prompt_ids = prompt(length)
        ids = greedy_ids(decoder, prompt_ids, 20, num_drafts=0)
        assert len(ids) == 20
        assert ids == transformers_choices(checkpoint, prompt_ids, ids), length
        for num_drafts in (1 + length % 2, 3 + length % 6):
            assert greedy_ids(decoder, prompt_ids, 20, num_drafts) == ids, (length, num_drafts)


def test_ids_equal_transformers_own_generate(base_checkpoint: RandomCheckpoint, decoder: Decoder) -> None:
    """With transformers' loader, cache and loop."""
    reference: Any = Qwen3_5ForCausalLM.from_pretrained(base_checkpoint.path, dtype=torch.float32)
    prompt_ids = prompt(37)
    output = reference.generate(torch.tensor([prompt_ids]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert greedy_ids(decoder, prompt_ids, 40, num_drafts=3) == output[0, 37:].tolist()


@pytest.mark.parametrize("num_drafts", range(9))
@pytest.mark.parametrize("length", [1, 5, 66, 129])
def test_every_draft_length_gives_the_same_ids(decoder: Decoder, num_drafts: int, length: int) -> None:
    prompt_ids = prompt(length, seed=1)
    ids = greedy_ids(decoder, prompt_ids, 30)
    steps = run(decoder, prompt_ids, max_tokens=30, num_speculative_tokens=num_drafts, ignore_eos=True)
    assert flat(steps) == ids
    assert steps[0] == Step((ids[0],), drafted=0, accepted=0)
    assert all(step.drafted == num_drafts for step in steps[1:])


@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_every_accept_count_gives_the_same_ids(
    decoder: Decoder, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm#846, vllm#39273, xLLM#2247: all a + 1 tokens of a step, once, whatever was rejected before."""
    prompt_ids = prompt(21, seed=num_drafts)
    ids = greedy_ids(decoder, prompt_ids, 140)
    accepts = [*range(num_drafts + 1), num_drafts, 0, 0, num_drafts, *reversed(range(num_drafts + 1))]
    force_accepts(monkeypatch, decoder, ids, len(prompt_ids), accepts)
    max_tokens = 1 + sum(accepts) + len(accepts)
    steps = run(decoder, prompt_ids, max_tokens=max_tokens, num_speculative_tokens=num_drafts, ignore_eos=True)
    assert [step.accepted for step in steps[1:]] == accepts
    assert [len(step.token_ids) for step in steps[1:]] == [count + 1 for count in accepts]
    assert flat(steps) == ids[:max_tokens]


def test_draft_length_may_change_every_step(decoder: Decoder) -> None:
    """vllm#40756: zero-draft steps in between are valid, however many."""
    prompt_ids = prompt(11)
    ids = greedy_ids(decoder, prompt_ids, 120)
    got = [decoder.session.prefill(prompt_ids)]
    for num_drafts in [0, 3, 0, 0, 8, 1, *[0] * 40, 5, 2, 0, 7]:
        tokens, accepted = decoder.session.step(num_drafts)
        assert len(tokens) == accepted + 1
        got += tokens
    assert got == ids[: len(got)]


@pytest.mark.parametrize(("prefill_rows", "chunk"), [(1, 64), (7, 16), (64, 64), (100, 64), (512, 16)])
def test_prefill_chunks_do_not_matter(
    base_checkpoint: RandomCheckpoint, prefill_rows: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder.load(base_checkpoint.path, device="cpu", native=False)
    prompt_ids = prompt(201)
    ids = greedy_ids(decoder, prompt_ids, 30, num_drafts=3)
    monkeypatch.setattr(session, "PREFILL_ROWS", prefill_rows)
    monkeypatch.setattr(gated_delta_net, "CHUNK", chunk)
    assert greedy_ids(decoder, prompt_ids, 30, num_drafts=3) == ids


def test_long_prompt_equals_transformers(base_checkpoint: RandomCheckpoint, decoder: Decoder) -> None:
    prompt_ids = prompt(1000)
    ids = greedy_ids(decoder, prompt_ids, 20, num_drafts=3)
    assert ids == transformers_choices(base_checkpoint, prompt_ids, ids)


@pytest.mark.parametrize("num_drafts", range(9))
@pytest.mark.parametrize("room", [1, 2, 5, 12])
def test_window_end_shortens_the_drafts(
    base_checkpoint: RandomCheckpoint,
    decoder: Decoder,
    native: bool,
    num_drafts: int,
    room: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TensorRT-LLM#16826: without max_tokens exactly what the window leaves comes, and nothing is written past it."""
    prompt_ids = prompt(50)
    ids = greedy_ids(decoder, prompt_ids, room + 10)
    small = Decoder.load(base_checkpoint.path, device="cpu", max_context=50 + room, native=native)
    force_accepts(monkeypatch, small, ids, len(prompt_ids), [])
    steps = run(small, prompt_ids, num_speculative_tokens=num_drafts, ignore_eos=True)
    assert flat(steps) == ids[:room]
    left = room - 1
    for step in steps[1:]:
        assert step.drafted == min(num_drafts, left - 1)
        left -= len(step.token_ids)
    assert run(small, prompt_ids, max_tokens=500, num_speculative_tokens=num_drafts, ignore_eos=True) == steps


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_stop_token_inside_an_accepted_run(decoder: Decoder, num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#31599, vllm#56101: the stop token is the last id, and only drafts that were emitted count as accepted."""
    prompt_ids = prompt(9)
    ids = greedy_ids(decoder, prompt_ids, 60)
    force_accepts(monkeypatch, decoder, ids, len(prompt_ids), [])
    for place in range(25):
        if ids[place] in ids[:place]:
            continue
        steps = run(decoder, prompt_ids, num_speculative_tokens=num_drafts, stop_token_ids=[ids[place]], max_tokens=40)
        assert flat(steps) == ids[: place + 1]
        assert steps[-1].accepted == min(len(steps[-1].token_ids), num_drafts if len(steps) > 1 else 0)


def test_stop_and_cap_in_the_same_run(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#33758: whichever comes first ends the text, also when one step holds both."""
    prompt_ids = prompt(9)
    ids = greedy_ids(decoder, prompt_ids, 60)
    force_accepts(monkeypatch, decoder, ids, len(prompt_ids), [])
    stop_place = next(i for i in range(3, 9) if ids[i] not in ids[:i])  # inside the first run of nine
    for max_tokens in range(1, 12):
        steps = run(
            decoder, prompt_ids, max_tokens=max_tokens, num_speculative_tokens=8, stop_token_ids=[ids[stop_place]]
        )
        assert flat(steps) == ids[: min(max_tokens, stop_place + 1)]


def test_cap_trims_the_last_run(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt_ids = prompt(9)
    ids = greedy_ids(decoder, prompt_ids, 60)
    force_accepts(monkeypatch, decoder, ids, len(prompt_ids), [])
    steps = run(decoder, prompt_ids, max_tokens=7, num_speculative_tokens=3, ignore_eos=True)
    assert [step.token_ids for step in steps] == [tuple(ids[:1]), tuple(ids[1:5]), tuple(ids[5:7])]
    assert [step.accepted for step in steps] == [0, 3, 2]


def test_eos_comes_from_both_configs_and_can_be_ignored(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", {"eos_token_id": None})
    prompt_ids = prompt(4)
    ids = greedy_ids(Decoder.load(checkpoint.path), prompt_ids, 20)
    first, second = ids[12], next(token for token in ids[5:12] if token != ids[12])
    config = json.loads((checkpoint.path / "config.json").read_text())
    (checkpoint.path / "config.json").write_text(json.dumps({**config, "eos_token_id": first}))
    (checkpoint.path / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, second]}))
    decoder = Decoder.load(checkpoint.path)
    assert decoder.eos_token_ids == {first, second}
    assert flat(run(decoder, prompt_ids, max_tokens=20)) == ids[: min(ids.index(first), ids.index(second)) + 1]
    assert flat(run(decoder, prompt_ids, max_tokens=20, ignore_eos=True)) == ids


def test_a_stopped_run_leaves_nothing_behind(decoder: Decoder) -> None:
    prompt_ids = prompt(30)
    ids = greedy_ids(decoder, prompt_ids, 20, num_drafts=3)
    abandoned = decoder.generate(prompt(300), max_tokens=50)
    next(abandoned)
    next(abandoned)
    assert greedy_ids(decoder, prompt_ids, 20, num_drafts=3) == ids
    with pytest.raises(DecoderError, match="another generate"):
        next(abandoned)


def test_a_run_never_reads_the_state_of_another(decoder: Decoder) -> None:
    """The latest generate() owns the session, also when an earlier one starts late."""
    early = decoder.generate(prompt(5), max_tokens=9)
    ids = greedy_ids(decoder, prompt(30), 9)
    late = decoder.generate(prompt(30), max_tokens=9, num_speculative_tokens=0, ignore_eos=True)
    got = list(next(late).token_ids)
    with pytest.raises(DecoderError, match="another generate"):
        next(early)
    assert got + [token_id for step in late for token_id in step.token_ids] == ids


def test_a_checkpoint_without_mtp_decodes_without_drafts(tmp_path: Path, base_checkpoint: RandomCheckpoint) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", {"mtp_num_hidden_layers": 0})
    with pytest.raises(RequestError, match="no MTP head"):
        Decoder.load(checkpoint.path, num_speculative_tokens=3)
    decoder = Decoder.load(checkpoint.path, num_speculative_tokens=0)
    ids = greedy_ids(decoder, prompt(8), 20)
    assert ids == transformers_choices(checkpoint, prompt(8), ids)


def test_refusals(decoder: Decoder, base_checkpoint: RandomCheckpoint) -> None:
    """vllm#37035: every draft length up to the stated maximum, a clear refusal above; all before the first step."""
    for options, message in [
        ({"num_speculative_tokens": 9}, "num_speculative_tokens is 9, expected 0 … 8"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1, expected 0 … 8"),
        ({"max_tokens": 0}, "max_tokens is 0, expected at least 1"),
    ]:
        with pytest.raises(RequestError, match=message):
            decoder.generate([1, 2], **options)  # type: ignore[arg-type]
    for prompt_ids, message in [
        ([], "the prompt is empty"),
        ([3, 211], "prompt token 1 is 211, expected 0 … 210"),
        ([-1], "prompt token 0 is -1, expected 0 … 210"),
        ([1] * 1024, "the prompt has 1024 tokens, the context holds 1024 with the output"),
    ]:
        with pytest.raises(RequestError, match=message):
            decoder.generate(prompt_ids, max_tokens=1)
    undrafted = Decoder.load(base_checkpoint.path, num_speculative_tokens=0)
    with pytest.raises(RequestError, match="num_speculative_tokens is 3, but no MTP head is loaded"):
        undrafted.generate([1], max_tokens=1, num_speculative_tokens=3)
    for load_options, message in [
        ({"num_speculative_tokens": 9}, "num_speculative_tokens is 9, expected 0 … 8"),
        ({"max_context": 1}, r"max_context is 1, expected 2 … 1024 \(max_position_embeddings\)"),
        ({"max_context": 1025}, "max_context is 1025"),
        ({"device": "tpu"}, "device is 'tpu', expected auto, cpu or cuda"),
        ({"device": "cpu", "dtype": torch.bfloat16}, "dtype is torch.bfloat16, the CPU path computes in torch.float32"),
    ]:
        with pytest.raises(RequestError, match=message):
            Decoder.load(base_checkpoint.path, **load_options)  # type: ignore[arg-type]


def test_the_longest_prompt_gives_one_token(decoder: Decoder, base_checkpoint: RandomCheckpoint) -> None:
    prompt_ids = prompt(1023)
    ids = greedy_ids(decoder, prompt_ids, 50, num_drafts=8)
    assert ids == transformers_choices(base_checkpoint, prompt_ids, ids)
    assert len(ids) == 1
