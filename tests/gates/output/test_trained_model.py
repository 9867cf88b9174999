"""The bundled decoder on the shipped trained model: its text passes, and the server's planted faults do not."""

from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from kernarc.decoder.cpu.model_faults import plant_in_model
from kernarc.decoder.generate import Decoder
from kernarc.gates.config import OutputCheckConfig
from kernarc.gates.output.scoring import ReferenceScorer
from tokenizers import Tokenizer

MODEL = Path(str(resources.files("kernarc.configs") / "models" / "python-7m"))
SOURCE = Path(__file__).parents[3] / "gates" / "pairing.py"
LENGTH = 48


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(SOURCE.read_text()).ids
    return ids[:256]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> ReferenceScorer:
    config = OutputCheckConfig(device="cpu", chunk_tokens=512)
    return ReferenceScorer(MODEL, config, tmp_path_factory.mktemp("scores"))


def answer(prompt: list[int], plant: str = "", value: float = 0.0) -> list[int]:
    decoder = Decoder.load(
        MODEL, device="cpu", native=False if plant else None
    )  # faults are planted in the plain model
    if plant:
        plant_in_model(decoder, plant, value, seed=0)
    return [token for step in decoder.generate(prompt, max_tokens=LENGTH, ignore_eos=True) for token in step.token_ids]


@pytest.fixture(scope="module")
def tau(scorer: ReferenceScorer, prompt: list[int]) -> float:
    return scorer.rounding_errors([(prompt, answer(prompt))]).tau


def test_the_decoders_own_text_has_no_divergence(scorer: ReferenceScorer, prompt: list[int], tau: float) -> None:
    gaps = scorer.scores(prompt, answer(prompt)).gaps
    assert len(gaps) == LENGTH
    assert (gaps <= tau).all()
    assert tau < 1  # far below the gaps of the faults below


@pytest.mark.parametrize(
    ("plant", "value"), [("stale_kv", 64), ("wrong_scale", 64.0), ("sampled", 1.0), ("nan", 1)], ids=str
)
def test_planted_fault_diverges(
    scorer: ReferenceScorer, prompt: list[int], tau: float, plant: str, value: float
) -> None:
    gaps = scorer.scores(prompt, answer(prompt, plant, value)).gaps
    assert np.sum(~(gaps <= tau)) > 0
