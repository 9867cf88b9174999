"""The bench of draft contexts: its ratios on numbers known beforehand, and the command on the model that ships."""

from __future__ import annotations

from pathlib import Path

import kernarc
import pytest
from click.testing import CliRunner
from kernarc.decoder.bench.draft_context import Continuation, check_same_output, main, ratio_to, settings_at
from kernarc.decoder.draft_context import WHOLE_PROMPT, DraftReading
from kernarc.decoder.errors import DecoderError

SHIPPED = Path(kernarc.__file__).parent / "configs" / "models" / "python-7m"


def continuation(tokens: int, steps: int, first: int = 5) -> Continuation:
    return Continuation([first, *range(tokens)], steps, ttft_ms=1.0, step_ms=1.0)


def test_the_ratio_is_the_mean_over_pairs() -> None:
    """Twice as many steps for the same tokens halves tokens a step, for every prompt alike: an interval of no width."""
    whole = [continuation(12, 4), continuation(20, 10), continuation(30, 10)]
    halved = [continuation(12, 8), continuation(20, 20), continuation(30, 20)]
    assert ratio_to(whole, halved, "tokens_per_step") == pytest.approx((-0.5, -0.5, -0.5))
    mixed = [continuation(12, 8), continuation(20, 5), continuation(30, 10)]  # halved, doubled, equal
    assert ratio_to(whole, halved, "tpot_ms") == pytest.approx((1.0, 1.0, 1.0)), "equal steps, half the tokens"
    point, low, high = ratio_to(whole, mixed, "tokens_per_step")
    assert point == pytest.approx(0)
    assert -0.5 <= low < -0.2
    assert 0.2 < high <= 1.0


def test_other_output_is_an_error() -> None:
    check_same_output([continuation(12, 4)], [continuation(14, 5)], 64)  # one step longer is no difference
    with pytest.raises(DecoderError, match="prompt 1 at depth 64 continues otherwise"):
        check_same_output([continuation(12, 4)] * 2, [continuation(12, 4), continuation(12, 4, first=6)], 64)


def test_the_command_on_the_model_that_ships() -> None:
    arguments = ["--depths", "64", "--contexts", "1,64", "--windows", "32", "--prompts", "2", "--max-tokens", "12"]
    done = CliRunner().invoke(main, [str(SHIPPED), *arguments])
    assert done.exit_code == 0, done.output
    rows = [line.split()[:3] for line in done.output.splitlines()[2:]]
    assert rows == [["64", "all", "all"], ["64", "all", "1"], ["64", "32", "32"]], "64 of 64 positions are all of them"


def test_what_is_compared() -> None:
    assert settings_at(1000, [1, 1000], [600, 100, 2000]) == [
        WHOLE_PROMPT,
        DraftReading(None, 1),
        DraftReading(600, 512),
        DraftReading(100, 100),
    ]
