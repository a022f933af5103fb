"""What is shared by the ranks of a host, and what costs its network card nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fold3d.plan.job import HostLink, Hosts
from fold3d.plan.strategy import Constraints
from tests.plan.jobs import evaluate, make_job

HOSTS = Hosts(per_host=4, between=HostLink(8e9, 5e-5), within=HostLink(300e9, 5e-6))


def test_links_of_a_mesh() -> None:
    one_host = HOSTS.network(4, 2)
    assert (one_host.bandwidth, one_host.tp_bandwidth, one_host.pp_latency) == (300e9, 300e9, 5e-6)
    several = HOSTS.network(8, 2)
    assert (several.bandwidth, several.tp_bandwidth, several.tp_latency) == (4e9, 300e9, 5e-6)
    wide = HOSTS.network(16, 8)  # a group on two hosts
    assert (wide.bandwidth, wide.tp_bandwidth, wide.tp_latency) == (2e9, 2e9, 5e-5)


def test_places() -> None:
    assert HOSTS.of_places(4, 2, 1) == (0, 0, 0, 0, 1, 1, 1, 1)
    assert HOSTS.of_places(2, 2, 2) == (0, 0, 1, 1)
    assert HOSTS.of_places(2, 2, 1) == () and HOSTS.of_places(2, 2, 4) == ()


def test_stages_on_one_host_send_for_nothing_and_its_card_is_shared() -> None:
    """Two replicas of two stages: each on a host, activations stay inside and the sums of both stages share a card."""
    job = make_job(layers=8, pp=2, dp=2, micro_batches=4)
    fixed = Constraints(segments=1, schedule="1f1b", dp_sync="zero1", bucket_bytes=0)
    network = replace(job.network, pp_bandwidth=job.network.bandwidth)
    apart = evaluate(replace(job, network=network), fixed).step_ms
    together = evaluate(replace(job, network=network, hosts=(0, 0, 1, 1)), fixed).step_ms
    across = evaluate(replace(job, network=network, hosts=(0, 1, 0, 1)), fixed).step_ms  # sums stay inside
    assert across < together != apart
    with pytest.raises(Exception, match="hosts"):
        evaluate(replace(job, hosts=(0, 1)), fixed)
