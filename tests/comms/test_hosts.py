"""What is said where the shards of a stage lie on several hosts."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fold3d.comms import rings
from fold3d.comms.rings import Hosts, warn_of_hosts
from fold3d.comms.world_group import WorldGroup
from fold3d.topology import Topology
from tests.helpers.ranks import RankPool


def warnings_of(shards: tuple[int, ...]) -> list[str]:
    """Returns what this rank is told when rank 1's shards lie on these hosts, and those of rank 0 on one."""
    rank = dist.get_rank()
    world = WorldGroup(Topology(dp=1, pp=1, tp=2, rank=rank), 20.0)
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rings.logger, "warning", lambda text, *values: told.append(text % values))
        warn_of_hosts(Hosts(stages=(0,), replicas=(0,), shards=shards if rank else (0, 0)), world)
    world.close()
    return told


def test_shards_on_several_hosts_are_warned_of_once(ranks: RankPool) -> None:
    first, second = ranks.run(warnings_of, 2, (0, 1))
    assert len(first) == 1 and "tp=2: a tensor-parallel group is spread over 2 hosts" in first[0]
    assert "multiple of 2 processes" in first[0] and second == []
    assert ranks.run(warnings_of, 2, (0, 0)) == [[], []]
