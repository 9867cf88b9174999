"""The trainer from end to end on a CPU, and the folder it leaves."""

from json import loads
from pathlib import Path
from shutil import copytree

import pytest
import torch
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.generate import Decoder
from kernarc.decoder.training.bits import bits_per_byte, xz_bits_per_byte
from kernarc.decoder.training.card import add_scores
from kernarc.decoder.training.evaluate import measure_acceptance
from kernarc.decoder.training.losses import LossFunctions
from kernarc.decoder.training.model import TrainingModel
from kernarc.decoder.training.optimizer import learning_rate, orthogonalise
from kernarc.decoder.training.shape import SMOKE
from kernarc.decoder.training.tokenizer import END_OF_TEXT, encode_stream, token_bytes, train_tokenizer
from safetensors.torch import load_file
from tokenizers import Tokenizer

from .conftest import smoke, source


def test_a_smoke_run_learns_writes_a_whole_folder_and_repeats(
    corpus_folder: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {path.name for path in trained.iterdir()}
    assert files == {
        "README.md", "config.json", "generation_config.json", "heldout.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "training.json",
    }  # fmt: skip
    facts = loads((trained / "training.json").read_text())
    assert (facts["steps"], facts["unloop"]["steps"]) == (6, 1)
    assert facts["history"][0]["loss"] < 6.2  # ln 512 = 6.24 before any step
    smoke(corpus_folder, tmp_path / "second")
    printed = capsys.readouterr().out
    assert "held_out_bits_per_byte=" in printed
    assert "draft_3_agreement=" in printed
    assert "held_out_loops_at_128=" in printed
    first, second = (load_file(str(folder / "model.safetensors")) for folder in (trained, tmp_path / "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_its_card_takes_scores_and_its_folder_decodes(trained: Path, tmp_path: Path) -> None:
    folder = copytree(trained, tmp_path / "copy")
    add_scores(folder, {"mean acceptance length": 2.5})
    assert "| mean acceptance length | 2.5 |" in (folder / "README.md").read_text()
    assert "own greedy continuations" in (folder / "README.md").read_text()
    assert ModelConfig.from_directory(folder).has_mtp
    found = measure_acceptance(Decoder.load(folder, device="cpu"), [[1, 2, 3, 4] * 8], max_tokens=24, drafts=3)
    assert 1 <= found.mean_length <= 4
    assert found.rate(1) >= found.rate(3)


def test_bits_per_byte_of_an_even_guess() -> None:
    model = TrainingModel(SMOKE)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token equally likely: log2(512) = 9 bits a token
    sizes = torch.full((512,), 3)
    held_out = torch.randint(0, 512, (1000,))
    with torch.no_grad():
        found = bits_per_byte(model, LossFunctions(), held_out, sizes, length=256, stride=200, sequences=2)
    assert found.overall == pytest.approx(3.0, abs=1e-4)
    assert found.predicted_bytes == 4 * 256 * 3
    assert found.by_position == pytest.approx({(0, 256): 3.0}, abs=1e-4)


def test_xz_bits_per_byte_counts_the_container() -> None:
    assert xz_bits_per_byte(["a" * 1_000_000]) < 0.01
    assert xz_bits_per_byte(["a"]) > 8


def test_tokenizer_is_lossless_and_its_byte_counts_add_up() -> None:
    text = source(3) + "\ts = 'naïve ☃'\r\n\n\n        # end   \n"
    tokenizer = train_tokenizer([source(n) for n in range(5)], 400)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    sizes = token_bytes(tokenizer)
    assert sizes[ids].sum() == len(text.encode())
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert encode_stream(tokenizer, [text, ""]).tolist() == [*ids, 0, 0]
    assert ":\n        " in [Tokenizer.decode(tokenizer, [i]) for i in ids]


def test_orthogonalise_makes_singular_values_one() -> None:
    matrices = torch.randn(3, 96, 64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_learning_rate_warms_up_stays_and_falls_to_zero() -> None:
    assert [learning_rate(p, 1.0) for p in (0.0, 0.01, 0.02, 0.3)] == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert learning_rate(0.65, 1.0) == pytest.approx(0.5)
    assert learning_rate(1.0, 1.0) == 0.0


def test_learning_rate_can_end_above_zero() -> None:
    assert learning_rate(1.0, 1.0, 0.2) == pytest.approx(0.2)
    assert learning_rate(0.3, 1.0, 0.2) == 1.0
