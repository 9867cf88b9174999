"""Loops become unlikely, and what does not loop stays."""

import pytest
import torch
from kernarc.decoder.training.model import TrainingModel
from kernarc.decoder.training.shape import SMOKE
from kernarc.decoder.training.unloop import Unlooper, divergence, unlikelihood


def test_unlikelihood_and_divergence_of_known_distributions() -> None:
    even = torch.zeros(3, 4)
    assert float(unlikelihood(even, torch.tensor([0, 1, 2]))) == pytest.approx(0.287682, abs=1e-5)  # -ln(3/4)
    assert float(divergence(even, even)) == 0.0
    peaked = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert float(divergence(peaked, torch.zeros(1, 4))) == pytest.approx(0.173287, abs=1e-5)  # ln 4 - 1.75 ln 2


def test_a_round_lowers_the_unlikelihood_and_touches_only_the_last_layer() -> None:
    torch.manual_seed(0)
    model = TrainingModel(SMOKE)  # untrained, it repeats one token at once
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    unlooper = Unlooper(model, torch.randint(0, 512, (2, 64)))
    prompts = torch.randint(0, 512, (2, 128))
    share, _, first = unlooper.round(prompts, [0.0], batch=2)
    assert share > 0.5
    _, _, last = unlooper.round(prompts, [3e-3] * 4, batch=2)
    assert last < first
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith(("model.layers.3.", "model.norm.")) for name in changed)
