"""ReplicaAccelerator: what it does with models beside the one that is trained, and where a loss is only looked at."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from fold3d.topology import Topology
from fold3d.trainer.accelerator import ReplicaAccelerator


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
