"""profile_model: measured on layers of known time and on transformers models; nothing of the model is disturbed."""

from __future__ import annotations

import dataclasses
import functools
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fold3d.plan.costs import Profile
from fold3d.profile.layers import profile_model
from fold3d.profile.optimizer import update_cost
from fold3d.trace import trace
from tests.helpers.layer_sums import recomputed
from tests.helpers.models import MODELS
from tests.profile.sleepers import Sleepers

CPU = torch.device("cpu")


def sleepers() -> Sleepers:
    """The third block takes twice as long; the second one's weight is frozen."""
    model = Sleepers(0.002, 0.002, 0.004, 0.002)
    model.get_parameter("layers.1.weight").requires_grad_(False)
    return model


class Moody(nn.Module):
    """Fails on values other than zeros, which nobody can make up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if type(x) is torch.Tensor and x.count_nonzero():
            raise ValueError("not zero")
        return self.linear(x)


def test_kinds_are_told_apart_and_measured():
    model = sleepers()
    batch = {"x": torch.zeros(3, 8)}
    profile = profile_model(model, trace(model, example=batch), batch, CPU, seconds=0.2)
    assert profile.measured and len(profile.forward) == len(profile.backward) == 6
    assert profile.forward[1] == profile.forward[2] == profile.forward[4]
    assert profile.forward[1] >= 0.002 and profile.forward[3] >= 0.004 and profile.forward[1] != profile.forward[3]
    assert profile.forward[0] == profile.forward[5] == 0
    assert min(profile.backward[1:5]) > 0
    assert profile.activation_bytes == (96,) * 4
    assert profile.gradient_bytes == {
        "layers.0.weight": 32, "layers.1.weight": 0, "layers.2.weight": 32, "layers.3.weight": 32,
    }  # fmt: skip
    assert set(profile.parameter_bytes.values()) == {32}
    assert profile.update_seconds > 0 and profile.optimizer_bytes == pytest.approx(2, abs=0.01)
    assert pickle.loads(pickle.dumps(profile)) == profile


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_transformers_models(kind, device):
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(MODELS[kind]())
    ids = torch.zeros(2, 8, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    recorded = trace(model, example=batch)
    weights = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    before = torch.get_rng_state()
    kept = profile_model(model, recorded, batch, CPU, seconds=0.2)
    assert torch.equal(before, torch.get_rng_state())
    for name, p in model.named_parameters():
        assert p is weights[name][0] and p.grad is None
        assert p.is_meta or torch.equal(p, weights[name][1])
    blocks = len(recorded.blocks)
    assert kept.measured and len(kept.forward) == blocks + 2
    assert len(set(kept.forward[1:-1])) == 1 and min(kept.forward) > 0 and min(kept.backward) > 0
    again = recomputed(kept.layers[1], kept.activation_bytes[0])
    assert kept.layers[1].saved > again.saved == kept.activation_bytes[0]
    assert set(kept.gradient_bytes) == {name for name, _ in model.named_parameters()}


def test_what_cannot_be_run_alone_gets_its_share_by_flops():
    model = nn.Sequential(*(Moody() for _ in range(3)))
    batch = {"input": torch.zeros(2, 8)}
    profile = profile_model(model, trace(model, example=batch, blocks="."), batch, CPU, seconds=0.1)
    assert not profile.measured
    assert profile.forward[1] == profile.forward[2] > 0 == profile.forward[0]
    assert profile.backward[1] == 2 * profile.forward[1]
    # A forward that fails as a whole: another batch than the trace's.
    wrong = profile_model(model, trace(model, example=batch, blocks="."), {"input": torch.zeros(2, 9)}, CPU)
    assert not wrong.measured and wrong.activation_bytes == (64,) * 3


def test_ranks_agree_on_the_median():
    model = sleepers()
    batch = {"x": torch.zeros(3, 8)}
    mine = profile_model(model, trace(model, example=batch), batch, CPU, seconds=0.1)
    others = [dataclasses.replace(mine, forward=tuple(f * k for f in mine.forward)) for k in (1, 2, 9)]
    assert Profile.agreed(others).forward == others[1].forward
    assert Profile.agreed(others) == Profile.agreed(others[::-1])
    # The first block does not run in the other's micro-batch: layers are those of the same name.
    rest = {
        way: tuple(3 * t for t in (getattr(mine, way)[0], *getattr(mine, way)[2:])) for way in ("forward", "backward")
    }
    names = [str(layer) for layer in range(len(mine.forward))]
    found = Profile.agreed([mine, dataclasses.replace(mine, **rest)], [names, [names[0], *names[2:]]]).forward
    assert found == (2 * mine.forward[0], mine.forward[1], *(2 * time for time in mine.forward[2:]))


def test_layers_that_wait_are_delayed_by_nothing_that_takes_cores() -> None:
    batch = {"x": torch.zeros(3, 8)}
    waits = Sleepers(0.1, 0.1)  # longer than a busy machine keeps it from waking up
    idle = profile_model(waits, trace(waits, example=batch), batch, CPU, seconds=0.1)
    assert idle.busy < 0.5
    works = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    many = {"input": torch.zeros(256, 512)}
    busy = profile_model(works, trace(works, example=many, blocks="."), many, CPU, seconds=0.1)
    assert 0.5 < busy.busy <= 1.0
    assert Profile.agreed([busy, idle, idle]).busy == idle.busy


def test_an_optimizer_that_knows_its_parameters_is_no_obstacle() -> None:
    model = sleepers()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    batch = {"x": torch.zeros(3, 8)}
    recorded = trace(model, example=batch)

    def by_name(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "weight_decay": 0.1 * len(names[id(p)])} for p in parameters], lr=0.1)

    for optimizer in (by_name, torch.optim.LBFGS):
        profile = profile_model(model, recorded, batch, CPU, optimizer=optimizer, seconds=0.1)
        assert profile.optimizer_bytes == pytest.approx(2, abs=0.01), "AdamW stands for it"
    plain = profile_model(
        model, recorded, batch, CPU, optimizer=functools.partial(torch.optim.SGD, lr=0.1), seconds=0.1
    )
    assert plain.optimizer_bytes == 0
    muon = profile_model(model, recorded, batch, CPU, optimizer=torch.optim.Muon, seconds=0.1)
    assert muon.optimizer_bytes == pytest.approx(1, abs=0.01)


def test_an_optimizer_that_multiplies_matrices_gets_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon on matrices of a million elements keeps a core busy for half a minute per update."""
    shapes: set[tuple[int, ...]] = set()

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        shapes.update(tuple(parameter.shape) for parameter in parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    update_cost(make, CPU)
    assert len(shapes) == 3
    monkeypatch.setattr("fold3d.profile.optimizer._LONGEST_S", 0.0)  # whatever it would take is longer
    large = max(shapes)
    shapes.clear()
    update_cost(make, CPU)
    assert len(shapes) == 2 and large not in shapes
