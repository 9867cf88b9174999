"""Every planted fault is caught; ties and near-ties are not called divergences; what is no number never passes."""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from kernarc.gates.config import OutputCheckConfig
from kernarc.gates.outcomes import OutputOutcome, Verdict
from kernarc.gates.output.check import Scores, check_build
from kernarc.gates.output.near_ties import RoundingErrors
from kernarc.gates.output.scoring import ReferenceScorer
from kernarc.gates.rates import clustered_rate
from kernarc.harness.run.records import StreamRecord, StreamStatus
from transformers import Qwen3_5ForCausalLM

from ...fakes.broken_engines import greedy, random_model, write

MakeStream = Callable[..., StreamRecord]
LENGTH = 40
PROMPTS = {
    f"d128-l0-r{request}": torch.randint(0, 512, (70,), generator=torch.Generator().manual_seed(request)).tolist()
    for request in range(3)
}


@pytest.fixture(scope="module")
def model() -> Qwen3_5ForCausalLM:
    return random_model()


@pytest.fixture(scope="module")
def scorer(model: Qwen3_5ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> ReferenceScorer:
    folder = tmp_path_factory.mktemp("check")
    return ReferenceScorer(write(model, folder / "model"), OutputCheckConfig(device="cpu"), folder / "cache")


@pytest.fixture(scope="module")
def good(model: Qwen3_5ForCausalLM) -> list[list[int]]:
    return [greedy(model, prompt, LENGTH) for prompt in PROMPTS.values()]


@pytest.fixture(scope="module")
def errors(scorer: ReferenceScorer, good: list[list[int]]) -> RoundingErrors:
    return scorer.rounding_errors(list(zip(PROMPTS.values(), good, strict=True)))


@pytest.fixture
def check(
    make_stream: MakeStream, scorer: ReferenceScorer, errors: RoundingErrors
) -> Callable[[Sequence[list[int]]], OutputOutcome]:
    def run(outputs: Sequence[list[int]]) -> OutputOutcome:
        streams = [
            make_stream("b", request=request, token_ids=tuple(ids), max_tokens=LENGTH)
            for request, ids in enumerate(outputs)
        ]
        return check_build("b", streams, PROMPTS, scorer, tau=errors.tau, errors=errors)

    return run


Check = Callable[[Sequence[list[int]]], OutputOutcome]


def test_greedy_output_passes_and_every_token_matches(check: Check, good: list[list[int]]) -> None:
    found = check(good)
    assert (found.verdict, found.positions, found.matches, found.worst_gap) == (Verdict.PASS, 3 * LENGTH, 3 * LENGTH, 0)
    assert found.worst == ()


def test_a_bf16_engine_passes(check: Check, model: Qwen3_5ForCausalLM) -> None:
    rounded = copy.deepcopy(model)
    torch.nn.Module.to(rounded, torch.bfloat16)
    found = check([greedy(rounded, prompt, LENGTH) for prompt in PROMPTS.values()])
    assert found.verdict is Verdict.PASS
    assert found.near_ties > 0  # it does differ from fp32, and none of it is called a divergence
    assert found.divergences == 0


def test_dropped_token_is_caught(check: Check, model: Qwen3_5ForCausalLM) -> None:
    longer = [greedy(model, prompt, LENGTH + 1) for prompt in PROMPTS.values()]
    found = check([ids[:20] + ids[21:] for ids in longer])
    assert found.verdict is Verdict.FAIL
    assert "position 20" in found.reason
    assert min(token.position for token in found.worst) >= 20


def test_one_dropped_token_in_one_of_many_outputs_is_caught(check: Check, good: list[list[int]]) -> None:
    broken = [*good[:2], [*good[2][:30], good[2][31], *good[2][31:]]]
    found = check(broken)
    assert found.verdict is Verdict.FAIL
    assert "1 of 3 outputs" in found.reason


@pytest.mark.parametrize(
    "fault",
    [{"position_shift": 1}, {"stale_kv_at": 5}, {"sample_seed": 3}],
    ids=["off_by_one_position", "stale_kv_at_depth", "sampled_instead_of_greedy"],
)
def test_broken_engine_is_caught(check: Check, model: Qwen3_5ForCausalLM, fault: dict[str, int]) -> None:
    outputs = [greedy(model, prompt, LENGTH, **fault) for prompt in PROMPTS.values()]
    found = check(outputs)
    assert found.verdict is Verdict.FAIL
    assert found.worst_gap is not None
    assert found.tau is not None
    assert found.worst_gap > found.tau


def test_one_wrong_scale_block_is_caught(check: Check, model: Qwen3_5ForCausalLM) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.state_dict()["model.layers.1.mlp.gate_proj.weight"][:128, :128] *= 2
    assert check([greedy(broken, prompt, LENGTH) for prompt in PROMPTS.values()]).verdict is Verdict.FAIL


def test_engine_whose_logits_are_nan_is_caught(check: Check, good: list[list[int]]) -> None:
    """argmax over NaN is token 0, for ever."""
    assert check([ids[:10] + [0] * (LENGTH - 10) for ids in good]).verdict is Verdict.FAIL


def test_truncated_output_is_caught(check: Check, good: list[list[int]]) -> None:
    found = check([good[0], good[1][:-1], good[2]])
    assert (found.verdict, found.truncated) == (Verdict.FAIL, ("d128-l0-r1",))
    assert found.divergences == 0


class FixedScores:
    """Stands in for the reference: the same gaps for every output."""

    name = "fixed"

    def __init__(self, gaps: Sequence[float]) -> None:
        self.gaps = np.array(gaps)

    def scores(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Scores:
        return Scores(self.gaps[: len(output_ids)], np.zeros(len(self.gaps[: len(output_ids)]), dtype=np.int64))

    def release(self) -> None:
        return


def judged(make_stream: MakeStream, gaps: Sequence[float], max_divergence_rate: float = 0.0) -> OutputOutcome:
    stream = make_stream("b", token_ids=tuple(range(len(gaps))))
    return check_build("b", [stream], PROMPTS, FixedScores(gaps), tau=0.1, max_divergence_rate=max_divergence_rate)


def test_tie_near_tie_and_divergence(make_stream: MakeStream) -> None:
    found = judged(make_stream, [0.0, 0.0, 0.1, 0.05, 0.11])
    assert (found.matches, found.near_ties, found.divergences) == (2, 2, 1)
    assert found.worst_gap == 0.11
    assert [(token.position, token.gap) for token in found.worst] == [(4, 0.11), (2, 0.1), (3, 0.05)]


@pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf, -0.01])
def test_a_gap_that_is_no_distance_never_passes(make_stream: MakeStream, gap: float) -> None:
    found = judged(make_stream, [0.0] * 9 + [gap])
    assert (found.verdict, found.divergences) == (Verdict.FAIL, 1)
    assert OutputOutcome.model_validate_json(found.model_dump_json()) == found


def test_tau_that_is_not_a_number_lets_nothing_through(make_stream: MakeStream) -> None:
    stream = make_stream("b", token_ids=(1, 2))
    assert check_build("b", [stream], PROMPTS, FixedScores([0.0, 0.01]), tau=math.nan).verdict is Verdict.FAIL


def test_the_allowed_rate_holds_for_every_stream(make_stream: MakeStream) -> None:
    """1 divergence in 50 tokens is 2 %; the same number over all streams may not hide in one of them."""
    passed = judged(make_stream, [0.0] * 49 + [9.0], max_divergence_rate=0.02)
    failed = judged(make_stream, [0.0] * 48 + [9.0] * 2, max_divergence_rate=0.02)
    assert (passed.verdict, failed.verdict) == (Verdict.PASS, Verdict.FAIL)
    assert passed.max_divergence_rate == failed.max_divergence_rate == 0.02
    assert passed.reason.startswith("1 divergence, up to 2 % a stream allowed; every other emitted token is")
    assert "(2 in all, more than the 2 % a stream allowed)" in failed.reason
    assert "allowed" not in judged(make_stream, [0.0] * 50, max_divergence_rate=0.02).reason
    assert "allowed" not in judged(make_stream, [0.0] * 49 + [9.0]).reason


def test_nothing_to_check_is_void(make_stream: MakeStream) -> None:
    fixed = FixedScores([0.0])
    assert check_build("b", [], PROMPTS, fixed, tau=0.1).verdict is Verdict.VOID
    void = make_stream("b", status=StreamStatus.VOID, void_reason="died")
    assert check_build(
        "b", [void, make_stream("a"), make_stream("b", is_warmup=True)], PROMPTS, fixed, tau=0.1
    ).verdict is (Verdict.VOID)


def test_output_without_its_prompt_is_void(make_stream: MakeStream) -> None:
    found = check_build("b", [make_stream("b", request=77)], PROMPTS, FixedScores([0.0]), tau=0.1)
    assert found.verdict is Verdict.VOID
    assert "d128-l0-r77" in found.reason


def test_repetition_loop_voids_even_where_the_reference_agrees(make_stream: MakeStream) -> None:
    stream = make_stream("b", token_ids=(5, 6) * 40)
    found = check_build("b", [stream], PROMPTS, FixedScores([0.0] * 80), tau=0.1)
    assert (found.verdict, found.repetition_loops) == (Verdict.VOID, ("d128-l0-r0",))
    noted = check_build("b", [stream], PROMPTS, FixedScores([0.0] * 80), tau=0.1, loops_void=False)
    assert (noted.verdict, noted.repetition_loops) == (Verdict.PASS, ("d128-l0-r0",))


def test_clustered_rate_is_wider_than_one_that_takes_positions_as_independent() -> None:
    """10 of 1,000 positions wrong: spread over requests, or all in one of them."""
    spread = clustered_rate([1] * 10 + [0] * 10, [50] * 20)
    bunched = clustered_rate([10] + [0] * 19, [50] * 20)
    assert spread.rate == bunched.rate == 0.01
    assert bunched.high > 1.5 * spread.high
    independent_high = 0.0183  # Wilson, 10 of 1,000
    assert spread.high == pytest.approx(independent_high, abs=2e-3)


def test_rate_of_zero_has_an_honest_upper_bound() -> None:
    """Wilson for 0 of 20 clusters: z²/(n + z²) = 3.84/23.84."""
    found = clustered_rate([0] * 20, [64] * 20)
    assert (found.rate, found.low) == (0, 0)
    assert found.high == pytest.approx(3.8415 / 23.8415, rel=1e-3)
    assert clustered_rate([64] * 20, [64] * 20).high == 1


def test_an_exact_tie_is_a_match_whichever_of_the_two_is_emitted(make_stream: MakeStream, tmp_path: Path) -> None:
    """Two tokens with one and the same lm_head row: rank order may pick either."""
    model = random_model()
    prompt = PROMPTS["d128-l0-r0"]
    first = greedy(model, prompt, 1)[0]
    twin = (first + 1) % 512
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[first]
    scorer = ReferenceScorer(write(model, tmp_path / "model"), OutputCheckConfig(device="cpu"), tmp_path / "cache")
    for emitted in (first, twin):
        stream = make_stream("b", token_ids=(emitted,))
        found = check_build("b", [stream], PROMPTS, scorer, tau=0.0)
        assert (found.verdict, found.matches) == (Verdict.PASS, 1)
