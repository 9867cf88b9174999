"""Structured checkpoints: a known output, a chosen acceptance, the real shapes, bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.checkpoint.random_weights import NormalBits, from_bf16, to_bf16
from kernarc.decoder.checkpoint.shapes import NAMED_SHAPES, fp8_config, read_shape
from kernarc.decoder.checkpoint.synthetic import TokenCycle, structured_tensors, write_structured_checkpoint
from kernarc.decoder.checkpoint.weights import Checkpoint, load_weights
from kernarc.decoder.errors import CheckpointError
from kernarc.decoder.generate import Decoder
from safetensors import safe_open
from transformers import Qwen3_5ForCausalLM

VOCAB = 2048
P = 0.87


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("structured") / "tiny"
    write_structured_checkpoint("tiny", out, acceptance=P)
    return out


@pytest.fixture(scope="module")
def tiny_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("structured") / "tiny-fp8"
    write_structured_checkpoint("tiny", out, acceptance=P, fp8=True, seed=3)
    return out


def test_next_is_one_cycle_and_drafted_a_permutation() -> None:
    cycle = TokenCycle.make(1000, P, seed=5)
    assert sorted([7, *cycle.continuation(7, 999)]) == list(range(1000))
    assert cycle.continuation(7, 1000)[-1] == 7
    assert sorted(cycle.drafted) == list(range(1000))
    assert np.count_nonzero(cycle.drafted != cycle.next) == 130


@pytest.mark.parametrize(("acceptance", "wrong"), [(1.0, 0), (0.0, 1000), (0.5, 500), (0.9991, 0)])
def test_the_wrong_fraction(acceptance: float, wrong: int) -> None:
    cycle = TokenCycle.make(1000, acceptance, seed=1)
    assert np.count_nonzero(cycle.drafted != cycle.next) == wrong


def test_a_part_of_the_vocabulary_is_closed() -> None:
    cycle = TokenCycle.make(1000, P, seed=5, emitted=100)
    ids = set(map(int, cycle.emitted_ids))
    assert len(ids) == 100
    assert set(cycle.next) == set(cycle.drafted) == ids  # whatever precedes
    inside = next(iter(ids))
    assert {inside, *cycle.continuation(inside, 99)} == ids  # one cycle
    assert np.count_nonzero((cycle.drafted != cycle.next)[sorted(ids)]) == 13
    with pytest.raises(CheckpointError, match="1001 emitted tokens, expected 2 … 1000"):
        TokenCycle.make(1000, P, seed=5, emitted=1001)


def test_every_engine_keeps_to_the_emitted_tokens(tmp_path: Path) -> None:
    write_structured_checkpoint("tiny", tmp_path / "some", acceptance=P, seed=2, emitted=256)
    cycle = TokenCycle.of_checkpoint(tmp_path / "some", VOCAB)
    ids = json.loads((tmp_path / "some" / "draft_vocab.json").read_text())["ids"]
    assert ids == sorted(set(cycle.next))
    model = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "some", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(VOCAB)[None]).logits[0]
    assert (logits.argmax(-1).numpy() == cycle.next).all()
    top_two = logits.topk(2).values
    assert float((top_two[:, 0] - top_two[:, 1]).min()) > 2
    plain, reduced = (
        list(
            Decoder.load(tmp_path / "some", device="cpu", max_context=512, draft_vocab=path).generate(
                [3, 900], max_tokens=200
            )
        )
        for path in (None, tmp_path / "some" / "draft_vocab.json")
    )
    assert reduced == plain  # the same drafts were accepted: all of them are in the set
    assert [token for step in plain for token in step.token_ids] == cycle.continuation(900, 200)


def test_transformers_follows_the_cycle(tiny: Path) -> None:
    model = Qwen3_5ForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    cycle = TokenCycle.make(VOCAB, P, seed=0)
    with torch.no_grad():
        logits = model(torch.arange(VOCAB)[None]).logits[0]
        ids = [5, 9, 900]
        for _ in range(30):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert (logits.argmax(-1).numpy() == cycle.next).all()
    top_two = logits.topk(2).values
    assert float((top_two[:, 0] - top_two[:, 1]).min()) > 2  # no rounding of an engine changes the argmax
    assert ids[3:] == cycle.continuation(900, 30)


def test_every_step_of_the_decoder_is_known(tiny: Path) -> None:
    decoder = Decoder.load(tiny, device="cpu", max_context=2048)
    cycle = TokenCycle.make(VOCAB, P, seed=0)
    steps = list(decoder.generate([3, 900], max_tokens=1000, ignore_eos=True))
    assert [token for step in steps for token in step.token_ids] == cycle.continuation(900, 1000)
    last = steps[0].token_ids[-1]
    for step in steps[1:-1]:
        token, right = last, 0
        while right < 3 and cycle.drafted[token] == cycle.next[token]:
            token, right = int(cycle.next[token]), right + 1
        assert (step.drafted, step.accepted) == (3, right)
        last = step.token_ids[-1]
    by_position = Counter(step.accepted for step in steps[1:-1])
    mean_length = 1 + sum(accepted * count for accepted, count in by_position.items()) / (len(steps) - 2)
    assert mean_length == pytest.approx(1 + P + P**2 + P**3, rel=0.06)
    for position in (1, 2, 3):  # given that the drafts before it were right, a draft is right with probability p
        reached = sum(count for accepted, count in by_position.items() if accepted >= position - 1)
        kept = sum(count for accepted, count in by_position.items() if accepted >= position)
        assert kept / reached == pytest.approx(P, abs=4 * (P * (1 - P) / reached) ** 0.5)


def test_fp8_follows_its_cycle_too(tiny_fp8: Path, tmp_path: Path) -> None:
    decoder = Decoder.load(tiny_fp8, device="cpu", max_context=256)
    cycle = TokenCycle.make(VOCAB, P, seed=3)
    steps = list(decoder.generate([900], max_tokens=64, ignore_eos=True))
    assert [token for step in steps for token in step.token_ids] == cycle.continuation(900, 64)


def test_fp8_values_are_random_with_one_scale(tiny_fp8: Path) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    with safe_open(tiny_fp8 / "model.safetensors", framework="pt") as file:
        values, scale = file.get_tensor(name), file.get_tensor(name + "_scale_inv")
        kept = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - not a mapping
    assert values.dtype == torch.float8_e4m3fn
    assert (scale.dtype, tuple(scale.shape), len(scale.unique())) == (torch.bfloat16, (4, 2), 1)
    weight = values.float() * scale.float().unique()
    assert values.float().isfinite().all()
    assert float(weight.std()) == pytest.approx(1 / 256**0.5, rel=0.02)
    assert len(values.view(torch.uint8).unique()) > 90
    bf16 = {key.split("layers.")[-1] for key, dtype in kept.items() if dtype == "BF16" and "scale" not in key}
    assert {"lm_head.weight", "mtp.fc.weight", "0.linear_attn.in_proj_a.weight", "0.linear_attn.conv1d.weight"} <= bf16
    assert not any("mlp" in key or "o_proj" in key for key in bf16)


def test_the_same_seed_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    write_structured_checkpoint("tiny", tmp_path / "again", acceptance=P, workers=7)
    write_structured_checkpoint("tiny", tmp_path / "other", acceptance=P, seed=1)
    weights = (tiny / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_27b_by_its_headers() -> None:
    """Shapes and bytes against the published checkpoint's: nothing is made, nothing is written."""
    config = ModelConfig.from_dict(NAMED_SHAPES["27b"])
    cycle = TokenCycle(*(np.arange(248320) for _ in range(3)))
    tensors = {tensor.name: tensor for tensor in structured_tensors(config, cycle, seed=0, fp8=True)}
    assert tensors["model.layers.0.linear_attn.in_proj_qkv.weight"].shape == (10240, 5120)
    assert tensors["model.layers.63.self_attn.q_proj.weight"].shape == (12288, 5120)
    assert tensors["model.layers.63.mlp.down_proj.weight_scale_inv"].shape == (40, 136)
    assert {tensors[f"model.layers.{layer}.mlp.up_proj.weight"].file for layer in (0, 63)} == {"layers-0", "layers-63"}
    n_bytes = Counter[str]()
    for tensor in tensors.values():
        part = "mtp" if tensor.name.startswith("mtp.") else tensor.name.split(".")[1]
        n_bytes[part if tensor.name != "mtp.fc.weight" else "fc"] += tensor.n_bytes
    assert n_bytes["layers"] == pytest.approx(24.38e9, rel=1e-3)
    assert n_bytes["weight"] == pytest.approx(2.543e9, rel=1e-3)  # lm_head
    assert n_bytes["mtp"] == pytest.approx(0.372e9, rel=1e-2)
    assert n_bytes["fc"] == pytest.approx(0.105e9, rel=1e-2)
    quantization = fp8_config(NAMED_SHAPES["27b"], config)["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128]
    assert {"lm_head", "mtp.fc", "model.layers.0.linear_attn.in_proj_b"} <= set(quantization["modules_to_not_convert"])


MID_SHAPE = {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 10}


def test_memory_is_the_embedding_and_a_few_blocks(tmp_path: Path) -> None:
    """0.36 GB in FP8: the writer's peak over its start stays under the 32 MiB table and 2 threads' blocks."""
    (tmp_path / "config.json").write_text(json.dumps(NAMED_SHAPES["tiny"] | MID_SHAPE))
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from kernarc.decoder.checkpoint.synthetic import write_structured_checkpoint as write\n"
        "write('tiny', Path(sys.argv[2]) / 'small', workers=2)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "n_bytes = write(sys.argv[1], Path(sys.argv[2]) / 'mid', fp8=True, workers=2)\n"
        "print(n_bytes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "config.json"), str(tmp_path)]
    n_bytes, grown = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert n_bytes > 0.33e9
    assert grown < 200e6
    config = ModelConfig.from_directory(tmp_path / "mid")
    assert Checkpoint(tmp_path / "mid", config).shapes["lm_head.weight"] == (16384, 1024)


def test_a_multimodal_config_gives_a_text_only_checkpoint(tmp_path: Path) -> None:
    text = {**NAMED_SHAPES["tiny"], "rope_parameters": {"rope_theta": 1e7, "mrope_section": [3, 3, 2]}}
    text |= {"num_hidden_layers": 4, "vocab_size": 300, "model_type": "qwen3_5_text"}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text, "vision_config": {}})
    )
    write_structured_checkpoint(str(tmp_path), tmp_path / "out")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["model_type"], raw["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    assert "mrope_section" not in raw["rope_parameters"]
    steps = list(Decoder.load(tmp_path / "out", device="cpu", max_context=64).generate([5], max_tokens=20))
    assert [t for step in steps for t in step.token_ids] == TokenCycle.make(300, P, 0).continuation(5, 20)


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "tied.json").write_text(json.dumps(NAMED_SHAPES["tiny"] | {"tie_word_embeddings": True}))
    (tmp_path / "broken.json").write_text("{")
    for shape, out, said in (
        ("tiny", "full", "already exists"),
        ("huge", "a", "no shape named 'huge'"),
        (str(tmp_path / "tied.json"), "a", "its own lm_head"),
        (str(tmp_path / "broken.json"), "a", "not JSON"),
    ):
        with pytest.raises(CheckpointError, match=said):
            write_structured_checkpoint(shape, tmp_path / out)
    with pytest.raises(CheckpointError, match="not a probability"):
        write_structured_checkpoint("tiny", tmp_path / "a", acceptance=1.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.json", "full", "tied.json"]


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_structured_checkpoint("tiny", tmp_path / "a", on_bytes=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_bf16_rounding_equals_torch() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 3
    expected = values.bfloat16()
    bits = to_bf16(values.numpy())
    assert (bits.view(np.int16) == expected.view(torch.int16).numpy()).all()
    assert (from_bf16(bits) == expected.float().numpy()).all()


def test_normal_bits_are_normal() -> None:
    values = from_bf16(NormalBits(2.0).draw(100_001, (1, 2)))
    assert len(values) == 100_001
    assert abs(float(values.mean())) < 0.03
    assert float(values.std()) == pytest.approx(2.0, rel=0.01)
    assert float(np.mean(values**4) / values.var() ** 2) == pytest.approx(3.0, rel=0.06)


def test_loading_gives_what_was_meant(tiny: Path) -> None:
    config = ModelConfig.from_directory(tiny)
    weights = load_weights(Checkpoint(tiny, config), torch.float32, with_mtp=True)
    cycle, half = TokenCycle.make(VOCAB, P, seed=0), config.hidden_size // 2
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    assert torch.equal(head[torch.from_numpy(cycle.next), :half], embedding[:, :half] / 16)
    assert torch.equal(head[torch.from_numpy(cycle.drafted), half:], embedding[:, half:] / 16)
    assert torch.equal(weights["mtp.fc.weight"], torch.eye(256, 512))
    assert read_shape("tiny")["vocab_size"] == VOCAB
