"""Rounding decides few positions, and only near ones: honest engines pass on real text; samplers of any sort do not."""

import math
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from kernarc.gates.config import OutputCheckConfig
from kernarc.gates.outcomes import OutputOutcome, Rate, Verdict
from kernarc.gates.output.check import check_build
from kernarc.gates.output.near_ties import NearTieLimit, RoundingErrors
from kernarc.gates.output.scoring import ReferenceScorer
from kernarc.harness.run.records import StreamRecord, TokenEvent
from kernarc.harness.run.storage import RunDirectory
from scipy.stats import norm
from torch import Tensor
from transformers import AutoModelForCausalLM

MODEL = Path(str(resources.files("kernarc.configs") / "models" / "python-7m"))
RUN = RunDirectory(Path(__file__).parents[3] / "reports" / "examples" / "two-cores")
DEPTH = 128
Choose = Callable[[Tensor], Tensor]  # logits [streams, vocab] → token ids [streams]


def recorded(build: str) -> list[StreamRecord]:
    return [s for s in RUN.streams() if s.build == build and s.depth == DEPTH and not s.is_warmup]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model is thirty times slower where threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts() -> dict[str, tuple[int, ...]]:
    return {key: request.prompt_ids for key, request in RUN.requests().items()}


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> ReferenceScorer:
    return ReferenceScorer(MODEL, OutputCheckConfig(device="cpu"), tmp_path_factory.mktemp("scores"))


@pytest.fixture(scope="module")
def errors(scorer: ReferenceScorer, prompts: dict[str, tuple[int, ...]]) -> RoundingErrors:
    return scorer.rounding_errors([(prompts[s.request_id], s.token_ids) for s in recorded("vllm")])


@pytest.fixture
def judge(
    scorer: ReferenceScorer, errors: RoundingErrors, prompts: dict[str, tuple[int, ...]]
) -> Callable[[list[StreamRecord]], OutputOutcome]:
    def run(streams: list[StreamRecord]) -> OutputOutcome:
        # Texts of so small a model repeat themselves now and then: no matter here.
        return check_build(streams[0].build, streams, prompts, scorer, tau=errors.tau, errors=errors, loops_void=False)

    return run


Judge = Callable[[list[StreamRecord]], OutputOutcome]


@torch.no_grad()
def decode(
    prompts: dict[str, tuple[int, ...]],
    choose: Choose,
    dtype: torch.dtype = torch.float32,
    rounds: Callable[[Tensor], bool] = lambda activations: False,
) -> list[StreamRecord]:
    """A plain engine answers the recorded requests of one depth in one batch.

    rounds: which activations [streams, tokens, features] are cast to FP8 before they meet a weight.
    """
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.register_forward_pre_hook(lambda _, given: (fp8(given[0]) if rounds(given[0]) else given[0],))
    streams = recorded("kernarc")
    ids, cache, emitted = torch.tensor([prompts[stream.request_id] for stream in streams]), None, []
    for _ in range(streams[0].max_tokens):
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        ids = choose(output.logits[:, -1].float())[:, None]
        emitted.append(ids)
    return [
        stream.model_copy(update={"events": (TokenEvent(t_ns=0, token_ids=tuple(row)),)})
        for stream, row in zip(streams, torch.cat(emitted, dim=1).tolist(), strict=True)
    ]


def fp8(activations: Tensor) -> Tensor:
    """Through e4m3 and back, with a scale a token, as vLLM's dynamic activation quantisation does."""
    scale = activations.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 448
    return (activations / scale).to(torch.float8_e4m3fn).to(activations.dtype) * scale


def first(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def second_within(reach: float) -> Choose:
    """The second choice wherever its gap is at most `reach`."""

    def choose(logits: Tensor) -> Tensor:
        top = logits.topk(2)
        return torch.where(top.values[:, 0] - top.values[:, 1] <= reach, top.indices[:, 1], top.indices[:, 0])

    return choose


def sampled(temperature: float) -> Choose:
    generator = torch.Generator().manual_seed(0)
    return lambda logits: torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_greedy_engine_passes(judge: Judge, prompts: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    found = judge(decode(prompts, first, dtype))
    assert (found.verdict, found.positions) == (Verdict.PASS, 1024), found.reason
    assert (found.near_ties > 0) is (dtype is torch.bfloat16)


@pytest.mark.parametrize("build", ["vllm", "kernarc"])
def test_recorded_engines_pass(judge: Judge, build: str) -> None:
    assert judge(recorded(build)).verdict is Verdict.PASS


def test_the_second_choice_of_every_near_tie_fails(
    judge: Judge, prompts: dict[str, tuple[int, ...]], errors: RoundingErrors
) -> None:
    """No gap is beyond τ; only their number tells."""
    found = judge(decode(prompts, second_within(0.9 * errors.tau)))
    assert (found.verdict, found.divergences) == (Verdict.FAIL, 0)
    assert "this looks sampled, or numerically worse than bf16" in found.reason
    assert found.near_tie_rate is not None
    assert found.max_near_tie_rate is not None
    assert found.near_tie_rate.low > 2 * found.max_near_tie_rate


def test_sampling_fails_by_its_worst_gap_and_by_its_number_of_near_ties(
    judge: Judge, scorer: ReferenceScorer, errors: RoundingErrors, prompts: dict[str, tuple[int, ...]]
) -> None:
    """Five of six tokens that are not the first choice are within τ at a temperature of 0.05."""
    streams = decode(prompts, sampled(0.05))
    found = judge(streams)
    assert found.verdict is Verdict.FAIL
    assert found.worst_gap is not None
    assert errors.tau < found.worst_gap < 4 * errors.tau  # a τ four times as large would not see it
    by_number = check_build("kernarc", streams, prompts, scorer, tau=1.0, errors=errors, loops_void=False)
    assert (by_number.verdict, by_number.divergences) == (Verdict.FAIL, 0)


def test_fp8_activations_of_the_prompt_alone_pass(judge: Judge, prompts: dict[str, tuple[int, ...]]) -> None:
    """Decoding in full precision rests on a cache that was not, and that is no more than bf16 does."""
    found = judge(decode(prompts, first, rounds=lambda activations: activations.shape[1] > 1))
    assert found.verdict is Verdict.PASS, found.reason
    assert found.near_ties > 0


def test_an_allowed_rate_of_divergences_lets_fp8_activations_through_and_no_second_choices(
    scorer: ReferenceScorer, errors: RoundingErrors, prompts: dict[str, tuple[int, ...]]
) -> None:
    """FP8 rounds sixteen times as coarsely as bf16: no bf16 engine has as many near-ties."""

    def judged(streams: list[StreamRecord], allowed: float) -> OutputOutcome:
        return check_build(
            "kernarc",
            streams,
            prompts,
            scorer,
            tau=errors.tau,
            errors=errors,
            max_divergence_rate=allowed,
            loops_void=False,
        )

    rounded = decode(prompts, first, rounds=lambda activations: True)
    strict, allowed = judged(rounded, 0.0), judged(rounded, 0.03)
    assert (strict.verdict, allowed.verdict) == (Verdict.FAIL, Verdict.PASS)
    assert allowed.near_tie_rate is not None
    assert strict.max_near_tie_rate is not None
    assert allowed.near_tie_rate.low > strict.max_near_tie_rate
    assert judged(decode(prompts, second_within(0.9 * errors.tau)), 0.01).verdict is Verdict.FAIL


def normal_errors(sigma: float) -> RoundingErrors:
    return RoundingErrors(np.sort(np.abs(np.random.default_rng(0).normal(0, sigma, 20_000))))


@pytest.mark.parametrize("ratio", [1.0, 3.0])
def test_the_expected_rate_is_that_of_theory(ratio: float) -> None:
    """Leads uniform on [0, 1], normal errors: ∫ P(e > g) dg = E[max(e, 0)] = σ/√(2π)."""
    leads = np.linspace(0, 1, 10_001)
    assert normal_errors(0.03).rate(leads, ratio) == pytest.approx(ratio * 0.03 / math.sqrt(2 * math.pi), rel=0.02)


def test_tau_is_twice_the_99_5_percent_quantile() -> None:
    assert normal_errors(0.03).tau == pytest.approx(2 * 2.807 * 0.03, rel=0.03)


def test_tokens_that_cannot_change_places_have_no_say_in_tau() -> None:
    """1,000 near pairs whose errors are 0.01, and confident positions whose large logits bf16 moves by 0.25."""
    exact = np.array([[10.0, 9.9]] * 1000 + [[40.0, 20.0]] * 1000)
    rounded = np.array([[10.0, 9.91]] * 1000 + [[40.25, 20.0]] * 1000)
    assert RoundingErrors.between(exact, rounded).tau == pytest.approx(0.02)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_no_tau(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        RoundingErrors.between(np.array([[1.0, 0.5]]), np.array([[1.0, value]]))


def test_few_positions_forgive_three_and_many_what_twice_the_error_gives() -> None:
    errors = normal_errors(0.03)
    few = NearTieLimit.of(errors, np.full(50, 9.0), 0.0)
    assert (few.bf16_rate, few.max_rate) == (0.0, 3 / 50)
    assert few.complaint(Rate(rate=0.06, low=0.0599, high=0.2)) is None
    assert few.complaint(Rate(rate=0.07, low=0.0601, high=0.2)) is not None
    many = NearTieLimit.of(errors, np.linspace(0, 1, 10_001), 0.0)
    assert many.max_rate == pytest.approx(2 * many.bf16_rate, rel=0.01)


def test_allowed_divergences_allow_the_near_ties_that_come_with_them() -> None:
    """Errors of 5 σ leave the first choice beyond τ = 5.61 σ at ∫ P(e > g) dg = 5 σ · L(1.12) of positions.

    L(z) = φ(z) − z (1 − Φ(z)), the normal loss function.
    """
    sigma, z, leads = 0.03, 5.614 / 5, np.linspace(0, 1, 10_001)
    found = NearTieLimit.of(normal_errors(sigma), leads, 5 * sigma * float(norm.pdf(z) - z * norm.sf(z)))
    assert found.max_rate == pytest.approx(5 * found.bf16_rate, rel=0.06)
