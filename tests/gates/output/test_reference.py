"""The chunked reference against one whole transformers forward; FP8 blocks against their products by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from kernarc.gates.config import OutputCheckConfig
from kernarc.gates.output.reference import Reference, ReferenceModelError, dequantise, model_sha256
from kernarc.gates.output.scoring import ReferenceScorer
from safetensors.torch import load_file, save_file

from ...fakes.broken_engines import greedy, random_model, write, write_fp8

PROMPT = torch.randint(0, 512, (70,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(random_model(), tmp_path_factory.mktemp("reference") / "model")


@pytest.fixture(scope="module")
def output() -> list[int]:
    return greedy(random_model(), PROMPT, 30)


@pytest.mark.parametrize("chunk_tokens", [16, 23, 4096])
def test_chunks_give_the_logits_of_one_whole_forward(model_dir: Path, output: list[int], chunk_tokens: int) -> None:
    reference = Reference.load(model_dir, "float32", "cpu", chunk_tokens)
    found = torch.cat(list(reference.logit_rows(PROMPT, output)))
    with torch.no_grad():
        whole = random_model()(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)
    assert found.argmax(-1).tolist() == output


def test_several_outputs_of_one_prompt_do_not_touch_each_other(model_dir: Path, output: list[int]) -> None:
    reference = Reference.load(model_dir, "float32", "cpu", 32)
    first = torch.cat(list(reference.logit_rows(PROMPT, output)))
    list(reference.logit_rows(PROMPT, [1, 2, 3]))
    list(reference.logit_rows(PROMPT[:20], [4]))
    assert torch.equal(torch.cat(list(reference.logit_rows(PROMPT, output))), first)


def test_prompt_of_one_token(model_dir: Path) -> None:
    reference = Reference.load(model_dir, "float32", "cpu", 32)
    with torch.no_grad():
        whole = random_model()(torch.tensor([[7, 8]])).logits[0]
    torch.testing.assert_close(torch.cat(list(reference.logit_rows([7], [8, 9]))), whole, atol=1e-4, rtol=1e-4)


def test_fp8_blocks_become_their_exact_products(tmp_path: Path) -> None:
    exact = write_fp8(random_model(), tmp_path / "fp8")
    reference = Reference.load(tmp_path / "fp8", "float32", "cpu", 64)
    whole = random_model()
    whole.load_state_dict({**whole.state_dict(), **exact})
    with torch.no_grad():
        expected = whole(torch.tensor([PROMPT])).logits[0, -2:-1]
    torch.testing.assert_close(
        torch.cat(list(reference.logit_rows(PROMPT[:-1], PROMPT[-1:]))), expected, atol=1e-4, rtol=1e-4
    )


def test_dequantise_multiplies_ragged_blocks() -> None:
    """[129, 257] has scales [2, 3]; each value is its code times the scale of its block."""
    codes = torch.full((129, 257), 2.0).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 1.0, 3.0], [7.0, 9.0, 11.0]])
    found = dequantise(codes, scale, "w")
    corners = [(0, 0), (127, 128), (0, 256), (128, 0), (128, 256)]
    assert [float(found[corner]) for corner in corners] == [1, 2, 6, 14, 22]
    with pytest.raises(ReferenceModelError, match="expected \\(2, 3\\)"):
        dequantise(codes, scale.T, "w")


FAULTS = [
    "no directory",
    "no weights",
    "other model",
    "wrong shape",
    "truncated file",
    "FP8 without scale",
    "odd blocks",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_unreadable_checkpoints_are_refused(tmp_path: Path, fault: str) -> None:
    folder = write(random_model(), tmp_path / "model")
    weights = folder / "model.safetensors"
    if fault == "no directory":
        folder = tmp_path / "nowhere"
    elif fault == "no weights":
        weights.unlink()
    elif fault == "other model":
        (folder / "config.json").write_text('{"model_type": "llama"}')
    elif fault == "FP8 without scale":
        tensors = load_file(weights)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
        save_file(tensors, weights)
    elif fault == "odd blocks":
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"weight_block_size": [64, 64]}
        (folder / "config.json").write_text(json.dumps(config))
    elif fault == "truncated file":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(config.replace('"intermediate_size": 160', '"intermediate_size": 161'))
    with pytest.raises(ReferenceModelError):
        Reference.load(folder, "float32", "cpu", 64)


def test_hash_changes_with_one_scale(tmp_path: Path) -> None:
    write_fp8(random_model(), tmp_path / "fp8")
    before = model_sha256(tmp_path / "fp8")
    weights = tmp_path / "fp8" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_sha256(tmp_path / "fp8") != before


def test_results_are_cached_by_model_and_text(model_dir: Path, output: list[int], tmp_path: Path) -> None:
    scorer = ReferenceScorer(model_dir, OutputCheckConfig(device="cpu"), tmp_path)
    first = scorer.scores(PROMPT, output)
    assert first.gaps.tolist() == [0.0] * len(output)
    [stored] = tmp_path.glob("*.npz")
    np.savez(stored, gaps=np.full(len(output), 5.0), preferred=first.preferred, leads=first.leads)
    assert ReferenceScorer(model_dir, OutputCheckConfig(device="cpu"), tmp_path).scores(PROMPT, output).gaps[0] == 5.0
    assert scorer.scores(PROMPT, output[:-1]).gaps[0] == 0.0
    stored.write_bytes(b"torn")
    assert scorer.scores(PROMPT, output).gaps[0] == 0.0


def test_ids_outside_the_vocabulary_have_an_infinite_gap(model_dir: Path, output: list[int], tmp_path: Path) -> None:
    scorer = ReferenceScorer(model_dir, OutputCheckConfig(device="cpu"), tmp_path)
    gaps = scorer.scores(PROMPT, [*output[:3], 9999, -1]).gaps
    assert gaps[:3].tolist() == [0, 0, 0]
    assert np.isinf(gaps[3:]).all()


def test_tau_is_twice_the_99_5_percent_quantile_of_bf16_errors(
    model_dir: Path, output: list[int], tmp_path: Path
) -> None:
    """Of the contenders of each first choice; so short a text has too few for any to be left out."""
    found = ReferenceScorer(model_dir, OutputCheckConfig(device="cpu"), tmp_path).rounding_errors([(PROMPT, output)])
    exact = torch.cat(list(Reference.load(model_dir, "float32", "cpu", 512).logit_rows(PROMPT, output)))
    rounded = torch.cat(list(Reference.load(model_dir, "bfloat16", "cpu", 512).logit_rows(PROMPT, output)))
    errors = [
        abs(float(error[first] - error[token]))
        for row, error in zip(exact, rounded - exact, strict=True)
        for first, *others in [row.argsort(descending=True)[:8]]
        for token in others
    ]
    assert found.tau == pytest.approx(2 * float(np.quantile(errors, 0.995)), rel=0.2)  # bf16 depends on the row count
    assert 0.001 < found.tau < 1
