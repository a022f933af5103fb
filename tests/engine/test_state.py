"""The state of a model in parts: put together it is that of the whole, and taken apart it is each rank's part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fold3d.comms.world_group import WorldGroup
from fold3d.engine import state
from fold3d.errors import CheckpointError
from fold3d.placement.parameter_placement import ParameterPlacement
from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.shard import Shard
from fold3d.topology import Topology
from fold3d.weights.parts import Parts, shard_parameters
from tests.helpers.ranks import RankPool


def model() -> nn.Module:
    torch.manual_seed(4)
    made = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    made.register_buffer("scale", torch.full((3,), 2.0))
    return made


def plan(tp: int) -> ShardingPlan:
    """Returns a plan with uneven and overlapping parts, and parts that are nothing or the same on several ranks."""
    own = Shard.even(1, 4, tp).parts
    nothing = tuple(((0, 5),) if rank == tp - 1 else () for rank in range(tp))
    halves = tuple(((0, 2),) if rank < tp // 2 else ((2, 3),) for rank in range(tp))
    return ShardingPlan(
        tp=tp,
        shards={
            "0.weight": Shard.even(0, 5, tp),
            "0.bias": Shard(0, 5, nothing),
            "2.weight": Shard(1, 5, tuple((*runs, (4, 5)) for runs in own)),
            "2.bias": Shard(0, 3, halves, summed=True),
            "1.weight": Shard.replicated((5,), tp, summed=True),
        },
    )


def cut(whole: nn.Module, parts: Parts) -> Any:
    """Returns what `engine.state` looks at of a rank's model, one stage."""
    tp = parts.plan.tp
    names = [name for name, _ in whole.named_parameters()]
    placement = ParameterPlacement.of(names, None, [(0, 0)], 1, []).sharded(parts.plan)
    shard_parameters(whole, parts)
    parameters = dict(whole.named_parameters())
    primary = {name for name in names if placement.is_responsible(name, 0, parts.rank)}
    assert tp == 1 or parts.rank == 0 or len(primary) < len(names)
    return SimpleNamespace(
        model=whole, parts=parts, parameters=parameters, placement=placement, stage=0, primary=lambda: primary
    )


def trained() -> dict[str, Any]:
    """Returns the state of the whole model after two steps."""
    whole = cut(model(), Parts.whole())
    optimizer = torch.optim.AdamW(whole.parameters.values(), lr=0.1)
    for seed in range(2):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        whole.model(torch.randn(7, 6)).square().sum().backward()
        optimizer.step()
    alone = WorldGroup(Topology(dp=1, pp=1, rank=0), 30)
    return {
        "model": state.gather_model(whole, alone),
        "optimizer": state.gather_optimizer(whole, optimizer, alone),
    }


def there_and_back(dp: int, tp: int) -> dict[str, Any]:
    """Returns the state that the ranks put together after each has taken its part of the whole one."""
    topology = Topology(dp=dp, pp=1, tp=tp, rank=dist.get_rank())
    full = trained()
    own = cut(model(), Parts(plan(tp), topology.tp_rank))
    optimizer = torch.optim.AdamW(own.parameters.values(), lr=0.1)
    state.load(own, optimizer, full)
    for name, parameter in own.parameters.items():
        assert torch.equal(parameter, own.parts.take(name, full["model"][name]))
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
        # What is not this rank's to save: it must not be taken.
        shard = own.parts.shard_of(name)
        if shard is None and topology.tp_rank > 0:
            parameter.data.fill_(-1.0)
    world = WorldGroup(topology, 30)  # kept until all have come: dropping it cuts what others still connect
    if topology.tp_rank > 0:
        own.model.scale.fill_(-1.0)
    made = {
        "model": state.gather_model(own, world),
        "optimizer": state.gather_optimizer(own, optimizer, world),
    }
    world.barrier()
    world.close()
    return made if same(made, full) else {"made": made, "full": full}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (1, 3), (2, 2), (1, 4)])
def test_parts_make_the_whole_state(ranks: RankPool, dp: int, tp: int) -> None:
    found = ranks.run(there_and_back, dp * tp, dp, tp)
    full = trained()
    assert list(full["model"]) == list(found[0]["model"])
    assert all(same(one, full) for one in found)


def test_a_state_that_cannot_be_divided_changes_nothing() -> None:
    full = trained()
    full["optimizer"]["0.weight"] = {"row": torch.ones(5, 1)}
    own = cut(model(), Parts(plan(2), 1))
    optimizer = torch.optim.SGD(own.parameters.values(), lr=0.1)
    before = {name: p.detach().clone() for name, p in own.parameters.items()}
    with pytest.raises(CheckpointError, match=r"state 'row' of 0\.weight has shape \(5, 1\), the parameter \(5, 6\)"):
        state.load(own, optimizer, full)
    assert all(torch.equal(p, before[name]) for name, p in own.parameters.items())


def test_a_whole_of_another_shape_is_refused() -> None:
    full = trained()
    full["model"]["0.weight"] = torch.zeros(3, 6)  # of the shape of the part
    own = cut(model(), Parts(plan(2), 0))
    with pytest.raises(CheckpointError, match=r"shape \[3, 6\] for '0.weight', the model has shape \[5, 6\]"):
        state.load(own, None, full)
