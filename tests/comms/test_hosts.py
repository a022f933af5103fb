"""What is said where the shards of a stage lie on several hosts."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fold3d.comms import connections
from fold3d.comms.connections import spread_of_shards, warn_of_hosts
from fold3d.comms.world_group import WorldGroup
from fold3d.topology import Topology
from tests.helpers.ranks import RankPool


def warnings_of(hosts: list[str], cost: str) -> list[str]:
    """Returns what this rank is told when the ranks lie on these hosts, with tp=2."""
    rank = dist.get_rank()
    topology = Topology(dp=1, pp=len(hosts) // 2, tp=2, rank=rank)
    world = WorldGroup(topology, 20.0)
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections.logger, "warning", lambda text, *values: told.append(text % values))
        patch.setattr(connections, "host_identity", lambda: hosts[rank])
        warn_of_hosts(spread_of_shards(world), topology, cost)
    world.close()
    return told


def test_shards_on_several_hosts_are_warned_of_once(ranks: RankPool) -> None:
    first, *others = ranks.run(warnings_of, 4, ["a", "a", "a", "b"], "4 MB a step")
    assert len(first) == 1 and "tp=2: a tensor-parallel group is spread over 2 hosts" in first[0]
    assert "over the network: 4 MB a step; start a multiple of 2 processes" in first[0] and others == [[]] * 3
    assert ranks.run(warnings_of, 4, ["a", "a", "b", "b"], "") == [[]] * 4
