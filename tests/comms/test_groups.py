"""Groups: connections of their own, but one thread of gloo for all that carry control messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fold3d.comms.groups import Groups
from fold3d.topology import Submesh, Topology
from tests.helpers.launch import launch
from tests.helpers.ranks import RankPool

STAGES = Submesh(pp=(0, 1))


def _in_one_order(groups: Groups) -> list[Any]:
    """Returns what queues send and receive by, in the order in which all ranks made them."""
    return sorted(
        {group for group in groups.p2p.values() if group is not None}, key=lambda group: int(group.group_name)
    )


def _gloo_threads() -> int:
    names = [comm.read_text().strip() for comm in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def _use(with_p2p: bool) -> tuple[int, int, float]:
    """Returns gloo's threads before and with Groups, and the ranks summed over the default group when they are gone."""
    before = _gloo_threads()
    topology = Topology(dp=2, pp=2, rank=dist.get_rank())
    groups = Groups(topology, torch.device("cpu"), 30.0, [STAGES], with_p2p=with_p2p)
    made = [groups.ties[STAGES], *_in_one_order(groups), *groups.rings.values()]
    for group in made if with_p2p else made[:1]:
        total = torch.tensor([float(topology.rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(dist.get_process_group_ranks(group))
    total = torch.tensor([float(topology.rank)])
    groups.world.all_reduce(total)
    assert total.item() == 6.0
    during = _gloo_threads()
    groups.close()
    total = torch.tensor([float(topology.rank)])
    dist.all_reduce(total)
    return before, during, total.item()


@pytest.mark.parametrize(("with_p2p", "own"), [(False, 0), (True, 6)])
def test_control_groups_share_a_thread(ranks: RankPool, with_p2p: bool, own: int) -> None:
    """Two links of each direction and two rings have their own; the shared one may be there from an earlier test."""
    for before, during, total in ranks.run(_use, 4, with_p2p):
        assert during - before - own in (0, 1)
        assert total == 6.0


def _lanes() -> dict[str, list[int]]:
    """Returns the ranks of each of a rank's groups with two replicas, stages and shards."""
    topology = Topology(dp=2, pp=2, tp=2, rank=dist.get_rank())
    ties = [Submesh(pp=(0, 1), tp=(0,)), Submesh(pp=(0, 1), tp=(1,)), Submesh(pp=(1,), tp=(0, 1))]
    groups = Groups(topology, torch.device("cpu"), 30.0, ties, with_p2p=True)
    made = {"tensor": groups.tensor}
    made |= {f"line {number}": group for number, group in enumerate(_in_one_order(groups))}
    made |= groups.rings | {str(number): groups.ties[places] for number, places in enumerate(ties)}
    found = {}
    for name, group in made.items():
        if group is not None:
            total = torch.tensor([2.0**topology.rank])
            dist.all_reduce(total, group=group)
            found[name] = dist.get_process_group_ranks(group)
            assert total.item() == sum(2.0**rank for rank in found[name])
    found |= {"data": groups.data.ranks, "pipeline": groups.world.pipeline.ranks}
    groups.close()
    return found


@pytest.mark.gate
def test_a_lane_per_shard(ranks8: RankPool) -> None:
    """Pipelines and rings join ranks of one place on the axis tp, the tensor-parallel group those of one stage."""
    results = ranks8.run(_lanes, 8)
    for rank, found in enumerate(results):
        dp, pp, tp = rank // 4, rank // 2 % 2, rank % 2
        pipeline, replicas = [4 * dp + tp, 4 * dp + 2 + tp], [2 * pp + tp, 4 + 2 * pp + tp]
        shards = [4 * dp + 2 * pp, 4 * dp + 2 * pp + 1]
        assert found["pipeline"] == found["line 0"] == found["line 3"] == found[str(tp)] == pipeline
        assert found["reduce"] == found["gather"] == found["data"] == replicas
        assert found["tensor"] == shards
        assert found.get("2") == (shards if pp == 1 else None) and str(1 - tp) not in found


def _sum_lazily() -> None:
    """torch's own groups connect when they are first used."""
    dist.all_reduce(torch.ones(1))
    groups = Groups(Topology(dp=1, pp=2, rank=dist.get_rank()), torch.device("cpu"), 30.0, (), with_p2p=True)
    for group in _in_one_order(groups):
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == 2.0
    groups.world.all_reduce(total)
    assert total.item() == 4.0
    groups.close()


@pytest.mark.dist
def test_where_torch_connects_lazily() -> None:
    result = launch(_sum_lazily, 2, env={"TORCH_GLOO_LAZY_INIT": "1"}, timeout=60)
    assert [rank.returncode for rank in result] == [0, 0], result.report()


def _receive_while_another_sums() -> tuple[float, float]:
    groups = Groups(Topology(dp=1, pp=2, rank=dist.get_rank()), torch.device("cpu"), 30.0, [STAGES])
    late, soon = torch.full((1,), 5.0), torch.ones(1)
    if dist.get_rank() == 0:
        late.zero_()
        pending = dist.irecv(late, src=1, group=groups.ties[STAGES])
        groups.world.all_reduce(soon)  # only then does rank 1 send
        pending.wait()
    else:
        groups.world.all_reduce(soon)
        dist.send(late, dst=0, group=groups.ties[STAGES])
    groups.close()
    return late.item(), soon.item()


def test_a_call_that_waits_in_one_group_holds_up_no_other(ranks: RankPool) -> None:
    assert ranks.run(_receive_while_another_sums, 2) == [(5.0, 2.0)] * 2


def _own_groups_beside() -> tuple[str, str, list[str]]:
    """Returns the backends of a user's groups that are made before and after ours, and what is registered by then."""
    before = dist.new_group([0, 1], backend="cpu:gloo")
    groups = Groups(Topology(dp=1, pp=2, rank=dist.get_rank()), torch.device("cpu"), 30.0, ())
    after = dist.new_group([0, 1], backend="cpu:gloo")
    groups.close()
    return before.name(), after.name(), list(dist.Backend._plugins)


def test_groups_of_the_user_are_what_they_were(ranks: RankPool) -> None:
    """torch takes another default for "cpu:gloo" while a backend of somebody else's is registered."""
    for before, after, registered in ranks.run(_own_groups_beside, 2):
        assert before == after
        assert not any("fold3d" in name.lower() for name in registered)
