"""Which parameters lie in which bucket where weights are spread over a tensor-parallel group."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from fold3d.placement.bucket_layout import BucketSpec, bucket_layout
from fold3d.placement.parameter_placement import ParameterPlacement
from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.shard import Shard
from fold3d.topology import Submesh

WHOLE = {"rows": (10, 4), "norm": (4,), "keys": (4, 4), "other": (4,), "last": (3,)}
SHARDS = {
    "rows": Shard(0, 10, (((0, 7),), ((7, 10),))),
    "norm": Shard.replicated((4,), 2, summed=True),
    "keys": Shard.replicated((4,), 2, summed=True),
    "other": Shard.replicated((4,), 2),
    "last": Shard(0, 3, (((0, 3),), ())),
}


def layout_of(rank: int, dtypes: dict[str, torch.dtype] | None = None, names: tuple[str, ...] = ()) -> list[BucketSpec]:
    placement = ParameterPlacement.from_needed([list(WHOLE)], (), 1).sharded(ShardingPlan(tp=2, shards=SHARDS))
    parameters = {
        name: Parameter(torch.zeros(SHARDS[name].shape(shape, rank), dtype=(dtypes or {}).get(name, torch.float32)))
        for name, shape in WHOLE.items()
        if name in (names or WHOLE)
    }
    return bucket_layout(parameters, placement, None, [(0, 0)], 0, 0, rank)


def by_name(specs: list[BucketSpec]) -> dict[str, int]:
    return {name: spec.planned for spec in specs for name in spec.names}


def test_layers_are_joined_alike_on_all_ranks_of_a_group() -> None:
    """A rank that holds nothing of a layer counts it all the same: the planner's buckets are those of the stage."""
    first, second = layout_of(0), layout_of(1)
    assert by_name(second) == {name: number for name, number in by_name(first).items() if name != "last"}
    assert by_name(first) == {name: number for number, name in enumerate(WHOLE)}


def test_what_is_summed_over_a_group_lies_apart_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parameters whose gradients are summed over the group share a bucket, by dtype."""
    monkeypatch.setattr("fold3d.placement.bucket_layout.cut_buckets", lambda sizes, least: [(0, len(sizes))])
    both = Submesh(pp=(0,), tp=(0, 1))
    for rank in (0, 1):
        own = Submesh(pp=(0,), tp=(rank,))
        found = {spec.names: spec.summed_over for spec in layout_of(rank, names=("rows", "norm", "keys", "other"))}
        assert found == {("rows", "other"): own, ("norm", "keys"): both}
        mixed = layout_of(rank, {"keys": torch.bfloat16}, names=("norm", "keys"))
        assert [spec.names for spec in mixed] == [("norm",), ("keys",)]
