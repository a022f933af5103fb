"""The exchanges of TP.sync in the costs of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fold3d.plan.costs import Profile, TpExchange
from fold3d.profile.shard import halves_factor, with_tp_sync
from fold3d.splitting.plan_sharding import plan_sharding
from fold3d.trace import trace
from fold3d.trace.batches import synthetic_example
from tests.helpers import models
from tests.profile.sleepers import Sleepers

SAMPLES, LENGTH = 2, 16


def costs(family: str, **settings: Any) -> tuple[Profile, int]:
    """Returns the profile of a shard of three layers, and the bytes of the hidden state of a micro-batch."""
    model: Any = models.build(models.MODELS[family](layers=3))
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    traced = trace(model, example={"input_ids": ids})
    sharding = plan_sharding(model, traced, synthetic_example(model), 2, **settings)
    assert bool(sharding.sequence) == settings.get("sequence_parallel", False)
    size = 4 * SAMPLES * LENGTH * model.config.hidden_size
    profile = Profile(
        forward=(1.0,) * 5,
        backward=(2.0,) * 5,
        layers=(),
        activation_bytes=(size,) * 3,
        gradient_bytes={},
        parameter_bytes={},
        update_seconds=0.0,
        host_update_seconds=1e-8,
        optimizer_bytes=0.0,
        update_bytes=0.0,
        updates_together=False,
        measured=True,
    )
    made = with_tp_sync(profile, model, traced, sharding, {"input_ids": ids})
    assert (made.forward, made.backward) == (profile.forward, profile.backward)
    return made, size


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_block_makes_two_sums_each_way(family: str) -> None:
    profile, hidden = costs(family)
    for exchanges in (profile.tp_forward, profile.tp_backward):
        assert exchanges[1:-1] == ((TpExchange(hidden),) * 2,) * 3
    assert profile.halves_factor == 1.0, "two samples can be divided"


@pytest.mark.full
def test_parts_of_a_sequence_are_gathered_and_scattered() -> None:
    """As many bytes as sums; the first block's gradient and the last one's result are gathered besides."""
    profile, hidden = costs("llama", sequence_parallel=True)
    half, behind = TpExchange(hidden, trips=1), TpExchange(hidden, trips=1, follows=True)
    layer = (behind, half) * 2  # a region is entered behind what the one before it ended with
    assert profile.tp_forward[1:-1] == (layer, layer, (*layer, behind))
    assert profile.tp_backward[1:-1] == ((*layer, behind), layer, layer)
    assert profile.sub_micro_batches == min(3, SAMPLES)


def test_halves_that_take_as_long_as_the_whole_are_noticed() -> None:
    model, cpu = Sleepers(0.05, 0.05), torch.device("cpu")
    batch = {"x": torch.zeros(4, 8)}
    traced = trace(model, example=batch)
    found = halves_factor(model, traced, batch, cpu, seconds=0.2)
    assert found is not None and 1.4 < found < 3.0
    assert halves_factor(model, traced, {"x": torch.zeros(1, 8)}, cpu) is None
