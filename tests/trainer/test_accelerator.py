"""ReplicaAccelerator: what it does with models beside the one that is trained, and where a loss is only looked at."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn

from fold3d.errors import ConfigError
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
    accelerator.use_replicas(Nobody(), trained, torch.tensor)  # type: ignore[arg-type]
    assert accelerator.prepare_model(trained) is trained
    assert accelerator.prepare_model(reference, evaluation_mode=True) is reference
    assert trained.weight.device.type == "cpu"
    assert reference.weight.device.type == "meta"


def test_replicas_with_different_numbers_of_batches_are_refused() -> None:
    """Their exchanges aborted the job."""
    config = DataLoaderConfiguration(even_batches=False)
    alone = ReplicaAccelerator.adopt(Accelerator(cpu=True, dataloader_config=config), Topology(dp=1, pp=2, rank=0))
    assert not alone.even_batches
    with pytest.raises(ConfigError, match=r"even_batches=False gives 2 replicas different numbers of batches"):
        ReplicaAccelerator.adopt(Accelerator(cpu=True, dataloader_config=config), Topology(dp=2, pp=1, rank=0))
