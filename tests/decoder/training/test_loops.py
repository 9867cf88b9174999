"""Loops in batches are the harness's loops, and only what carries one on is marked."""

import random

import torch
from kernarc.decoder.training.loops import is_loop, longest_loops, loop_tokens
from kernarc.harness.client.repetition import find_repetition_loop


def looping(generator: random.Random, total: int) -> list[int]:
    """Noise, a repeated phrase somewhere, noise."""
    period, begin = generator.randrange(1, 40), generator.randrange(total)
    repeats = generator.randrange(1, 12)
    phrase = [generator.randrange(6) for _ in range(period)]
    noise = [generator.randrange(50) for _ in range(total)]
    return (noise[:begin] + phrase * repeats + noise)[:total]


def test_batches_find_the_loops_that_the_harness_finds() -> None:
    generator = random.Random(0)
    for total in (24, 64, 129):
        streams = [looping(generator, total) for _ in range(120)]
        found = [find_repetition_loop(ids) for ids in streams]
        assert is_loop(torch.tensor(streams)).tolist() == [loop is not None for loop in found]
        lengths = longest_loops(torch.tensor(streams)).tolist()
        assert [n for n, loop in zip(lengths, found, strict=True) if loop] == [loop.length for loop in found if loop]
    assert any(found)
    assert not all(found)


def test_what_carries_a_loop_on_is_marked_from_the_third_telling() -> None:
    prompt = [90, 91, 1, 2, 3, 4]
    ids = torch.tensor([prompt + [1, 2, 3, 4] * 6 + [9, 8, 7]])  # the first telling lies in the prompt
    marked = loop_tokens(ids, len(prompt))[0].tolist()
    assert marked == [False] * (len(prompt) + 4) + [True] * 20 + [False] * 3


def test_short_tables_and_loops_of_the_prompt_are_left_alone() -> None:
    short = torch.tensor([[5, 6, 7, 0, 1, 0, 1, 0, 1, 0, 1, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]])
    assert not loop_tokens(short, 2).any()
    in_prompt = torch.tensor([[1, 2] * 20 + [7, 8, 9]])
    assert not loop_tokens(in_prompt, 40).any()
