"""Loops become unlikely, and a model that is there can be mended."""

import math
from pathlib import Path
from shutil import copytree

import pytest
import torch
from kernarc.decoder.generate import Decoder
from kernarc.decoder.training import unloop
from kernarc.decoder.training.card import read_facts
from kernarc.decoder.training.losses import unlikelihood
from kernarc.decoder.training.model import TrainingModel
from kernarc.decoder.training.shape import SMOKE
from kernarc.decoder.training.streams import Streams
from kernarc.decoder.training.trainer import Budget, Plan, Trainer
from kernarc.decoder.training.unloop import Unlooper, UnloopPlan, stretch_change
from safetensors.torch import load_file


def test_unlikelihood_of_known_probabilities() -> None:
    nats = torch.tensor([math.log(4), math.log(2)])
    assert unlikelihood(nats).tolist() == pytest.approx([math.log(4 / 3), math.log(2)], abs=1e-6)
    logits = torch.tensor([60.0, 0.0], requires_grad=True)  # a token that is certain in fp32
    unlikelihood(-logits.log_softmax(-1)[:1]).sum().backward()
    assert bool(logits.grad is not None and torch.isfinite(logits.grad).all())


def trainer_on(stream: torch.Tensor) -> Trainer:
    streams = Streams(stream, stream[:0], stream)
    return Trainer(SMOKE, Plan(512, 128, 256, 3e-3, 0, 1e9, False), streams, torch.ones(512, dtype=torch.long), "cpu")


def test_unlikelihood_makes_a_loop_that_was_learnt_unlikely() -> None:
    trainer = trainer_on(torch.arange(5000) % 8)  # text that is one loop
    for _ in range(6):
        trainer.train_step(0.3)
    unlooper = Unlooper(trainer, UnloopPlan(((64, 64),), 1.0, 3e-3, 64))
    losses, shares = [], []
    for _ in range(5):
        found, loops, share = unlooper.rollout_losses()
        (loops + found.draft_total()).backward()
        trainer.update(3e-3)
        losses.append(float(loops.detach()))
        shares.append(float(share))
    assert shares[0] > 0.8
    assert losses[-1] < 0.5 * losses[0]


def test_a_step_learns_text_and_drafts_and_reports(tmp_path: Path) -> None:
    trainer = trainer_on(torch.randint(0, 512, (5000,), generator=torch.Generator().manual_seed(3)))
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    Unlooper(trainer, UnloopPlan(((64, 64),), 1.0, 3e-3, 64)).run(Budget(steps=2), tmp_path)
    same = [name for name, tensor in trainer.model.state_dict().items() if torch.equal(tensor, before[name])]
    assert same == []
    assert (tmp_path / "model.safetensors").is_file()
    assert 0.0 <= trainer.history[-1]["held_out_loops_at_128"] <= 1.0


@pytest.mark.parametrize("stretch", [0.75, 1.1])
def test_the_change_is_stretched(stretch: float) -> None:
    model = TrainingModel(SMOKE)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    stretch_change(model, before, stretch)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, before[name] + stretch, atol=1e-5), name


def test_the_command_mends_a_copy(trained: Path, corpus_folder: Path, tmp_path: Path) -> None:
    model = copytree(trained, tmp_path / "model")
    arguments = ["--corpus", str(corpus_folder), "--out", str(tmp_path / "mended"), "--smoke", "--steps", "1"]
    unloop.main([str(model), *arguments], standalone_mode=False)
    before, after = (load_file(str(f / "model.safetensors")) for f in (model, tmp_path / "mended"))
    assert before.keys() == after.keys()
    assert not torch.equal(before["mtp.fc.weight"], after["mtp.fc.weight"])
    assert read_facts(tmp_path / "mended")["unloop"]["steps"] == 1
    assert Decoder.load(tmp_path / "mended", device="cpu") is not None
