"""The model folder in the repository: its size, its shapes, and that its drafts are accepted."""

from collections import Counter
from importlib.resources import files
from json import loads
from pathlib import Path

import pytest
import torch
from kernarc.decoder.generate import Decoder
from kernarc.decoder.training.corpus import is_held_out
from kernarc.decoder.training.evaluate import measure_acceptance
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(str(files("kernarc.configs") / "models" / "python-7m"))
# Not in any training text: written for this test.
TEXT = '''class Ledger:
    """Entries by date, with a running balance."""

    def __init__(self, opening=0):
        self.opening = opening
        self.entries = []

    def add(self, date, amount, note=None):
        """Append an entry and return the new balance."""
        if amount == 0:
            raise ValueError("an entry needs an amount")
        self.entries.append((date, amount, note))
        return self.balance()

    def balance(self, until=None):
'''


def test_folder_is_small_and_complete() -> None:
    names = {path.name for path in MODEL.iterdir()}
    assert {"README.md", "config.json", "generation_config.json", "heldout.json", "model.safetensors"} <= names
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 16_000_000


def test_every_quantised_linear_has_whole_fp8_blocks() -> None:
    small = ("in_proj_a", "in_proj_b", "norm", "conv1d")
    with safe_open(str(MODEL / "model.safetensors"), framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16
            if tensor.ndim == 2 and not any(part in name for part in small):
                assert all(size % 128 == 0 for size in tensor.shape), name


def test_held_out_list_follows_its_rule() -> None:
    listed = loads((MODEL / "heldout.json").read_text())
    assert len(listed["modules"]) > 20
    assert all(map(is_held_out, listed["modules"]))
    assert {Path(entry["path"]).parts[0].removesuffix(".py") for entry in listed["files"]} == set(listed["modules"])


def test_transformers_reads_the_same_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids
    assert tokenizer(TEXT)["input_ids"] == ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == loads((MODEL / "config.json").read_text())["eos_token_id"]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.load(MODEL, device="cpu")


def test_drafts_are_accepted(decoder: Decoder) -> None:
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids
    found = measure_acceptance(decoder, [ids, ids[:64], ids[:40]], max_tokens=64, drafts=3)
    assert found.accepted is not None
    assert found.accepted != Counter()
    assert found.mean_length >= 2.2


def test_transformers_would_emit_the_same_tokens(decoder: Decoder) -> None:
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids
    output = [i for step in decoder.generate(ids, max_tokens=48, ignore_eos=True) for i in step.token_ids]
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]
    gaps = logits.amax(-1) - logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
    assert float(gaps.max()) < 1e-3  # fp32 against fp32: only rounding decides a tie
