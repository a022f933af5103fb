"""Buffers are shared when some have changed, however that came about, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fold3d.data_parallel.buffers import BufferSync
from fold3d.faults.progress import Progress
from fold3d.placement.parameter_placement import ParameterPlacement


class Replica:
    """A stage's model, and the replicas of the stage: this one, which gets `first`, and replica 0."""

    is_first = False
    stage = 0

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
        self.model[1].register_buffer("mask", torch.ones(3))
        self.first = {
            name: (buffer.shape, buffer.dtype, torch.full_like(buffer, 7).view(-1).view(torch.uint8))
            for name, buffer in self.model.named_buffers()
        }
        self.shared = 0
        self.placement = ParameterPlacement.from_needed([[]], (), pp=1)

    def share(self, value: Any) -> dict[str, tuple[torch.Size, torch.dtype, torch.Tensor]]:
        self.shared += 1
        return self.first


def forward(model: Any) -> None:
    model[0](torch.randn(4, 2))


def past_the_version_counter(model: Any) -> None:
    model[1].mask.data.zero_()


def replaced(model: Any) -> None:
    model[1].mask = model[1].mask + 1


def added(model: Any) -> None:
    model[1].register_buffer("other", torch.ones(1))


def made() -> tuple[Replica, BufferSync]:
    replica = Replica()
    return replica, BufferSync(replica, replica, Progress())  # type: ignore[arg-type]


def step(sync: BufferSync, during: Callable[[], None] = lambda: None) -> bool:
    sync.begin()
    during()
    changed = sync.changed()
    assert sync.changed() == changed  # whoever asks again hears the same
    sync.agree(changed)
    return changed


def test_buffers_that_stay_cost_nothing() -> None:
    replica, sync = made()
    assert [step(sync) for _ in range(5)] == [False] * 5
    assert replica.shared == 1  # before the first step: they need not be alike
    assert all((buffer == 7).all() for buffer in replica.model.buffers())


@pytest.mark.parametrize("change", [forward, past_the_version_counter, replaced, added])
def test_a_change_is_seen(change: Callable[[Any], None]) -> None:
    replica, sync = made()
    assert step(sync, lambda: change(replica.model))
    step(sync)
    assert replica.shared == 2 and (replica.model[1].mask == 7).all()


@pytest.mark.parametrize("change", [forward, replaced])
def test_a_change_in_a_later_step_is_seen_and_shared_once(change: Callable[[Any], None]) -> None:
    replica, sync = made()
    step(sync)
    assert step(sync, lambda: change(replica.model))
    assert [step(sync) for _ in range(3)] == [False] * 3 and replica.shared == 2


def test_a_change_of_another_replica_and_a_step_without_an_answer() -> None:
    replica, sync = made()
    step(sync)
    sync.agree(True)
    sync.begin()
    assert replica.shared == 2
    sync.begin()  # nobody has asked
    assert replica.shared == 3


def test_a_cache_of_another_size_stays_this_replicas() -> None:
    replica, sync = made()
    replica.first["1.mask"] = torch.Size([9]), torch.float32, torch.zeros(9).view(torch.uint8)
    step(sync)
    assert (replica.model[1].mask == 1).all() and (replica.model[0].running_mean == 7).all()
