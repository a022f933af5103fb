"""ReplicaAccelerator: what it does with models beside the one that is trained, and where a loss is only looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from fold3d.stage.aside import aside
from torch import nn

from fold3d.topology import Topology
from fold3d.trainer.replicas.accelerator import ReplicaAccelerator


class Nobody:
    """Replicas that do not answer."""


@pytest.fixture
def accelerator() -> ReplicaAccelerator:
    return ReplicaAccelerator.adopt(Accelerator(cpu=True), Topology(dp=3, pp=1, tp=1, rank=1))


def test_other_models_go_to_the_device(accelerator: ReplicaAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference model is whole in each process; the one that is trained stays where its parts lie."""
    monkeypatch.setattr(ReplicaAccelerator, "device", torch.device("meta"))
    trained, reference = nn.Linear(2, 2), nn.Linear(2, 2)
    accelerator.use_replicas(Nobody(), trained)  # type: ignore[arg-type]
    assert accelerator.prepare_model(trained) is trained
    assert accelerator.prepare_model(reference, evaluation_mode=True) is reference
    assert trained.weight.device.type == "cpu"
    assert reference.weight.device.type == "meta"


def test_a_loss_that_is_looked_at_asks_nobody(accelerator: ReplicaAccelerator) -> None:
    accelerator.use_replicas(Nobody(), nn.Linear(2, 2))  # type: ignore[arg-type]
    one = torch.tensor([2.0])

    def look() -> list[Any]:
        found = [accelerator.gather(one), accelerator.gather_for_metrics(one[0]), accelerator.gather_for_metrics(["a"])]
        found += [accelerator.reduce(one, way) for way in ("sum", "mean", "max", "none")]
        found += [accelerator.pad_across_processes(one)]
        return [value.tolist() if isinstance(value, torch.Tensor) else value for value in found]

    assert aside(look, 30.0) == [[2.0] * 3, [2.0] * 3, ["a"] * 3, [6.0], [2.0], [2.0], [2.0], [2.0]]
    with pytest.raises(AttributeError):  # otherwise they are asked
        accelerator.gather(one)
