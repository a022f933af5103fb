"""probe_network on this machine's loopback, over our own links and over gloo: plausible, and the same on all ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from fold3d._C import CommError
from fold3d.comms.groups import Groups
from fold3d.profile.network import ShardLink, probe_network, probe_shards, tcp_messages
from fold3d.topology import Topology


def _probe(dp: int, pp: int, over_tcp: bool):
    topology = Topology(dp=dp, pp=pp, rank=dist.get_rank())
    device = torch.device("cpu")
    groups = Groups(topology, device, 30.0, (), with_p2p=not over_tcp)
    try:
        return probe_network(groups, 30.0, over_tcp=over_tcp, activation_bytes=8192, seconds=0.2)
    finally:
        groups.close()


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("over_tcp", [True, False], ids=["tcp", "gloo"])
@pytest.mark.parametrize("dp, pp", [(1, 4), (2, 2), (4, 1), (1, 3)])
def test_all_ranks_get_the_same_numbers(ranks, dp, pp, over_tcp):
    found = ranks.run(_probe, dp * pp, dp, pp, over_tcp)
    assert all(links == found[0] for links in found)
    assert 0 < found[0].pp_latency < 0.1 and 0 < found[0].hop_latency < 0.1
    assert 1e6 < found[0].bandwidth < 1e12


def _probe_shards(over_tcp: bool) -> ShardLink:
    topology = Topology(dp=1, pp=2, tp=2, rank=dist.get_rank())
    device = torch.device("cpu")
    groups = Groups(topology, device, 30.0, (), with_p2p=False)
    try:
        return probe_shards(groups, 30.0, over_tcp=over_tcp, size=1 << 16, seconds=0.2)
    finally:
        groups.close()


@pytest.mark.parametrize("over_tcp", [True, False], ids=["tcp", "gloo"])
def test_links_of_shards(ranks, over_tcp):
    found = ranks.run(_probe_shards, 4, over_tcp)
    assert all(link == found[0] for link in found)
    assert 1e6 < found[0].bandwidth < 1e12 and 0 < found[0].latency < 0.1
    assert 0 <= found[0].toll <= 1 / found[0].bandwidth


def _answers_late(delays: list[float]) -> str:
    """Rank 1 answers each exchange late; returns what rank 0 was told."""
    topology = Topology(dp=1, pp=2, rank=dist.get_rank())
    groups = Groups(topology, torch.device("cpu"), 30.0, (), with_p2p=False)
    told = ""
    try:
        with tcp_messages(groups, 1.0) as pass_on:
            for delay in delays:
                time.sleep(delay * topology.rank)
                pass_on(8)
    except CommError as error:
        told = str(error)
    dist.barrier()
    groups.close()
    return told


def test_a_stage_that_does_not_answer_is_named(ranks):
    assert "stage 1 did not answer within 1 s" in ranks.run(_answers_late, 2, [0.0, 2.0])[0]


def test_the_timeout_is_of_one_wait_and_not_of_all(ranks):
    assert ranks.run(_answers_late, 2, [0.4] * 4) == ["", ""]
