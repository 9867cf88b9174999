"""The network being trained against transformers, against its own definition token by token, and as a checkpoint."""

from json import dumps
from pathlib import Path

import pytest
import torch
from kernarc.decoder.training.layers import Layer, Tokens, causal_attention
from kernarc.decoder.training.losses import LossFunctions, batch_losses
from kernarc.decoder.training.model import TrainingModel
from kernarc.decoder.training.rollout import Rollout
from kernarc.decoder.training.shape import SMOKE, Shape
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

WIDE = Shape(vocab_size=384, hidden_size=128, intermediate_size=128, linear_value_heads=4, tied=False, num_layers=4)
LENGTH = 128


def random_model(shape: Shape) -> TrainingModel:
    torch.manual_seed(0)
    model = TrainingModel(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def random_ids(shape: Shape, sequences: int = 2) -> Tensor:
    ids = torch.randint(0, shape.vocab_size, (sequences, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, 40:60] = 7
    return ids


@pytest.mark.parametrize("shape", [SMOKE, WIDE], ids=["tied", "untied-grouped-heads"])
def test_logits_equal_transformers(shape: Shape, tmp_path: Path) -> None:
    model = random_model(shape)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if shape.tied:
        del weights["lm_head.weight"]
    save_file(weights, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(dumps(shape.to_config() | {"dtype": "float32"}))
    assert Shape.from_directory(tmp_path) == shape
    ids = random_ids(shape)
    reference = Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(ids).logits.flatten(0, 1)
        found = model.logits(model.hidden(ids.flatten(), Tokens.of(shape, 2, LENGTH, "cpu")))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-5)


def draft_by_draft(model: TrainingModel, ids: Tensor, hidden: Tensor, place: int) -> list[Tensor]:
    """One chain of three drafts after position `place` of one sequence, as a decoder makes it (MODEL.md section 1)."""
    layer = model.mtp.layers[0]
    assert isinstance(layer, Layer)
    before = Tokens.of(model.shape, 1, place + 1, "cpu")
    x = model.mtp_input(ids[1 : place + 2], hidden[: place + 1])
    q, gate, k, v = layer.project(x, before, model.kernels)
    out = model.mtp_output(layer.finish_attention(x, causal_attention(q, k, v, 1), gate, model.kernels))[-1:]
    chain = [out]
    for position in (place + 1, place + 2):
        here = Tokens.of(model.shape, 1, 1, "cpu", position)
        x = model.mtp_input(ids[position + 1 : position + 2], out)
        q, gate, own_k, own_v = layer.project(x, here, model.kernels)
        k, v = torch.cat((k, own_k)), torch.cat((v, own_v))
        heads = [t.repeat_interleave(q.shape[1] // t.shape[1], 1).transpose(0, 1) for t in (k, v)]
        scores = q.transpose(0, 1) @ heads[0].transpose(1, 2) * model.shape.head_dim**-0.5
        mixed = (scores.softmax(-1) @ heads[1]).transpose(0, 1)
        out = model.mtp_output(layer.finish_attention(x, mixed, gate, model.kernels))
        chain.append(out)
    return chain


def test_three_recursive_drafts_equal_a_decoders_chain() -> None:
    model = random_model(SMOKE)
    ids, start, width = random_ids(SMOKE), 50, 32
    with torch.no_grad():
        hidden = model.hidden(ids.flatten(), Tokens.of(SMOKE, 2, LENGTH, "cpu"))
        drafts = model.mtp_drafts(ids.flatten(), hidden, Tokens.of(SMOKE, 2, LENGTH, "cpu"), start, width)
        for place in (start, start + 17):
            chain = draft_by_draft(model, ids[1], hidden.view(2, LENGTH, -1)[1], place)
            found = [drafts.hidden[0].view(2, LENGTH, -1)[1, place]]
            found += [drafts.hidden[n].view(2, width, -1)[1, place + n - start] for n in (1, 2)]
            for ours, theirs in zip(found, chain, strict=True):
                torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=2e-5)


def test_every_weight_learns() -> None:
    model = random_model(SMOKE)
    ids = random_ids(SMOKE)
    losses = batch_losses(
        model, LossFunctions(), torch.cat((ids, ids[:, :1]), 1), Tokens.of(SMOKE, 2, LENGTH, "cpu"), 64
    )
    losses.total().backward()
    still = [n for n, p in model.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
    assert still == []
    assert len(losses.drafts) == 3


@pytest.mark.parametrize("shape", [SMOKE, WIDE], ids=["smoke", "wide"])
def test_rollouts_are_the_greedy_text_of_the_whole_model(shape: Shape) -> None:
    model = random_model(shape)
    rollout = Rollout(model, 3, 64, 64)
    for seed in (1, 2):  # buffers are used again
        prompts = torch.randint(0, shape.vocab_size, (3, 64), generator=torch.Generator().manual_seed(seed))
        ids = rollout.run(prompts, prefill_tokens=128)  # the prompts in two parts
        assert torch.equal(ids[:, :64], prompts)
        with torch.no_grad():
            hidden = model.hidden(ids.flatten(), Tokens.of(shape, 3, 128, "cpu"))
            logits = model.logits(hidden).view(3, 128, -1)[:, 63:-1]
        gaps = logits.amax(-1) - logits.gather(-1, ids[:, 64:, None])[..., 0]
        assert float(gaps.max()) < 1e-3
