"""probe_links over gloo on this machine's loopback: plausible, and the same on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fold3d.runtime.link_probe import probe_links
from fold3d.topology import Topology


def _probe(dp: int, pp: int):
    topology = Topology(dp=dp, pp=pp, rank=dist.get_rank())
    pipe = data = None
    for replica in range(dp):
        group = dist.new_group(topology.pipeline(replica))
        pipe = group if replica == topology.dp_rank else pipe
    for stage in range(pp):
        group = dist.new_group(topology.replicas(stage))
        data = group if stage == topology.pp_rank else data
    return probe_links(
        device=torch.device("cpu"),
        dp=dp,
        pp=pp,
        stage=topology.pp_rank,
        activation_bytes=8192,
        data_group=data,
        pipe_group=pipe,
        seconds=0.2,
    )


@pytest.mark.parametrize("dp, pp", [(1, 4), (2, 2), (4, 1), (1, 3)])
def test_all_ranks_get_the_same_numbers(ranks, dp, pp):
    found = ranks.run(_probe, dp * pp, dp, pp)
    assert all(links == found[0] for links in found)
    assert 0 < found[0].pp_latency < 0.1 and 0 < found[0].hop_latency < 0.1
    assert 1e6 < found[0].bandwidth < 1e12
