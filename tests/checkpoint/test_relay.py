"""Relay: data of every rank comes to the first, by few ranks and in order; one that is gone ends it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fold3d.checkpoint.delivery import Relay
from fold3d.comms import world_group
from fold3d.comms.tree_group import Tree, TreeGroup
from fold3d.comms.world_group import WorldGroup
from fold3d.topology import Topology
from tests.helpers.ranks import RankPool

LIMIT = 30.0


@contextlib.contextmanager
def world_of(tp: int, fan_out: int, dp: int = 1) -> Iterator[WorldGroup]:
    """All ranks, over trees with `fan_out` members below each."""

    class Narrow(TreeGroup):
        def __init__(self, ranks, *args, **named):
            super().__init__(ranks, *args, **named, tree=Tree(len(ranks), fan_out))

    with mock.patch.object(world_group, "TreeGroup", Narrow):
        world = WorldGroup(Topology(dp=dp, pp=dist.get_world_size() // (dp * tp), tp=tp, rank=dist.get_rank()), LIMIT)
    try:
        yield world
        world.barrier()
    finally:
        world.close()


def bring_all(tp: int, fan_out: int, turns: int, dp: int = 1) -> tuple[list[list[int]], int]:
    """Returns, on the first rank, what came from the others, a turn after the other, and how many came by here."""
    with world_of(tp, fan_out, dp) as world:
        relay, rank, passed = Relay(world, LIMIT), dist.get_rank(), 0
        came: list[list[int]] = []
        for turn in range(turns):
            for source in range(1, dist.get_world_size()):
                if relay.is_on_way(source):
                    size = 1000 * source + turn
                    data = (
                        torch.full((size,), source + turn, dtype=torch.uint8)
                        if rank == source
                        else torch.zeros(size, dtype=torch.uint8)
                    )
                    relay.bring(data, source)
                    passed += rank not in (0, source)
                    if rank == 0:
                        came.append([size, *data.unique().tolist()])
        relay.end()
    return came, passed


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("pp, tp, fan_out", [(4, 1, 1), (8, 1, 2), (2, 2, 4), (4, 2, 1), (1, 8, 2), (2, 4, 1)])
def test_everybody_reaches_the_first(ranks8: RankPool, pp: int, tp: int, fan_out: int) -> None:
    found = ranks8.run(bring_all, pp * tp, tp, fan_out, 3)
    assert found[0][0] == [[1000 * s + turn, s + turn] for turn in range(3) for s in range(1, pp * tp)]
    # Each is passed on by those above it in the tree of the stages at its place, then in that of the shards of stage 0.
    stages, shards = Tree(pp, fan_out), Tree(tp, fan_out)

    def above(tree: Tree, member: int) -> list[int]:
        parent = tree.parent(member)
        return [] if parent is None else [parent, *above(tree, parent)]

    passed = [0] * (pp * tp)
    for source in range(1, pp * tp):
        stage, shard = divmod(source, tp)
        way = {s * tp + shard for s in above(stages, stage)} | set(above(shards, shard))
        for rank in way - {0}:
            passed[rank] += 3
    assert [count for _, count in found] == passed


@pytest.mark.parametrize("dp, pp, tp", [(4, 1, 1), (2, 2, 1), (2, 2, 2)])
def test_every_replica_reaches_the_first(ranks8: RankPool, dp: int, pp: int, tp: int) -> None:
    found = ranks8.run(bring_all, dp * pp * tp, tp, 1, 2, dp)
    assert found[0][0] == [[1000 * s + turn, s + turn] for turn in range(2) for s in range(1, dp * pp * tp)]


def miss_one() -> str:
    """Rank 2 does not send; returns what the others are told."""
    told = ""
    with world_of(1, 1) as world:
        relay = Relay(world, 0.5 if dist.get_rank() == 0 else 1.5)
        try:
            if dist.get_rank() < 2:
                relay.bring(torch.zeros(10, dtype=torch.uint8), 2)
        except dist.DistNetworkError as error:
            told = str(error)
        dist.barrier()
        world.barrier = lambda: None  # type: ignore[method-assign]
    return told


def test_a_rank_that_does_not_send_is_named(ranks: RankPool) -> None:
    first, second, _ = ranks.run(miss_one, 3)
    assert first.startswith("rank 1 cannot be reached, or did not come within 0.5 s")
    assert second.startswith(("rank 2 cannot be reached", "rank 0 cannot be reached"))
