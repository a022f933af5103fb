"""TP.sync in the costs of layers."""

from __future__ import annotations

from typing import Any

import pytest

from fold3d.errors import ConfigError
from fold3d.plan.costs import Profile
from fold3d.profile.assumed import assumed_profile
from fold3d.profile.shard import of_a_shard
from fold3d.profile.tp_sync import with_tp_sync
from fold3d.sharding.plan import ShardingPlan
from fold3d.splitting.plan_sharding import plan_sharding
from fold3d.trace import Trace, trace
from fold3d.trace.example import synthetic_example
from tests.helpers import models

LINK: dict[str, Any] = {"bandwidth": 1e9, "latency": 1e-5}


@pytest.fixture(scope="module")
def shard() -> tuple[Profile, Trace, ShardingPlan]:
    model = models.build(models.MODELS["gpt2"](layers=3))
    example = synthetic_example(model)
    traced = trace(model, example=example)
    sharding = plan_sharding(model, traced, example, 2)
    profile = assumed_profile(model, traced, example, flops_per_second=1e9, recompute=False)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return of_a_shard(profile, traced, sharding, shapes), traced, sharding


def test_a_block_waits_for_two_sums_each_way(shard: tuple[Profile, Trace, ShardingPlan]) -> None:
    """Over two ranks a sum takes its bytes once, and two hops."""
    before, traced, sharding = shard
    after = with_tp_sync(*shard, **LINK, overlap="none")
    size = before.activation_bytes[0]
    for block in range(len(traced.blocks)):
        for times, plain in ((after.forward, before.forward), (after.backward, before.backward)):
            assert times[block + 1] - plain[block + 1] == pytest.approx(2 * (size / 1e9 + 2e-5))
    assert (after.backward[0], after.forward[-1]) == (before.backward[0], before.forward[-1])
    embedded = (size / 1e9 + 2e-5) if sharding.vocabulary.embeddings else 0.0
    assert after.forward[0] - before.forward[0] == pytest.approx(embedded)
    assert (after.gradient_bytes, after.layers) == (before.gradient_bytes, before.layers)


def test_halves_hide_it(shard: tuple[Profile, Trace, ShardingPlan]) -> None:
    before, traced, _ = shard
    way = {name: with_tp_sync(*shard, **LINK, overlap=name) for name in ("none", "sub", "auto")}
    for block in range(1, len(traced.blocks) + 1):
        assert before.forward[block] < way["sub"].forward[block] < way["none"].forward[block]
        assert way["auto"].forward[block] == way["sub"].forward[block]
    with pytest.raises(ConfigError, match="tp_overlap='half'"):
        with_tp_sync(*shard, **LINK, overlap="half")
