"""Connecting the stages of a replica, the replicas of a stage, and its shards: for PP.sync, and rings for DP.sync and
TP.sync; and the arbiter that the ranks of a host share.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from dataclasses import dataclass
from typing import Any

import torch

from fold3d import _C
from fold3d.comms.groups import Groups
from fold3d.comms.interface import host_identity, local_address, nearest_cards
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import ConfigError
from fold3d.topology import Topology, V


def uses_tcp(transport: str, device: torch.device) -> bool:
    """Returns whether messages and sums go over TCP connections of our own. Raises: ConfigError if they cannot."""
    if transport == "tcp" and device.type != "cpu":
        raise ConfigError('transport="tcp" moves host memory, but parameters are on a GPU; use "c10d" or "auto"')
    return transport == "tcp" or (transport == "auto" and device.type == "cpu")


def connect_stages(topology: Topology, world: WorldGroup, timeout: float) -> _C.TcpPeers:
    """Returns this stage's connections to its neighbours; all ranks of the replica call.

    Args:
        world: addresses and the connections' secret are sent over its connections.
        timeout: seconds until a stage that does not connect is an error.
    Raises: RuntimeError (CommError, or torch's own) when one cannot be reached, or the job has failed.
    """
    pipeline = world.pipeline
    secret = pipeline.share(secrets.token_hex(32))
    host = local_address()
    peers = _C.TcpPeers(topology.pp_rank, topology.pp, host, secret, f"stages of replica {topology.dp_rank}")
    endpoints = pipeline.share(pipeline.gather((host, peers.port)))
    with world.progress.life.ending(peers):
        both_ways = topology.style == V
        peers.connect(endpoints[topology.next_stage], endpoints[topology.previous_stage], timeout, both_ways)
    return peers


logger = logging.getLogger(__name__)


def connect_replicas(
    topology: Topology,
    groups: Groups,
    arbiter: _C.NicArbiter,
    device: torch.device,
    timeout: float,
    *,
    over_tcp: bool,
    hosts: PeerHosts | None = None,
    makes_room: bool = True,
    clock: _C.StreamClock | None = None,
) -> _C.BucketSync:
    """Returns this rank's part in the DP.sync of its stage; all replicas of the stage call.

    PP.sync may interrupt DP.sync every so many bytes as the measured bandwidth asks for. Over TCP a bucket is sent on
    as many connections as the longest round trip asks for.

    Args:
        hosts: where the replicas are; None: a host for each, and no messages.
        makes_room: False: DP.sync does not wait for messages; the same on every rank.
        clock: of the device, for what is recorded; None: one of its own.
        timeout: seconds until a replica that does not come is an error.
    """
    peers, lines = None, 1
    if over_tcp:
        secret = groups.data.share(secrets.token_hex(32))
        host = local_address()
        peers = _C.RingPeers(topology.dp_rank, topology.dp, host, secret, f"replicas of stage {topology.pp_rank}")
        endpoints = groups.data.share(groups.data.gather((host, peers.port)))
        with groups.world.progress.life.ending(peers):
            peers.connect(endpoints[(topology.dp_rank + 1) % topology.dp], timeout)
        lines = max(groups.data.share(groups.data.gather(peers.lines_needed())))
    return _C.BucketSync(
        topology.dp_rank,
        topology.dp,
        arbiter,
        device,
        timeout,
        topology.describe(topology.rank),
        slice_bytes=0,
        peers=peers,
        reduce_group=groups.ring_names()["reduce"],
        gather_group=groups.ring_names()["gather"],
        hosts=[] if hosts is None else list(hosts.replicas),
        makes_room=makes_room and hosts is not None,
        clock=clock,
        lines=lines,
    )


def connect_shards(
    topology: Topology,
    groups: Groups,
    arbiter: _C.NicArbiter,
    timeout: float,
    *,
    over_tcp: bool,
    hosts: PeerHosts | None = None,
) -> _C.TensorSync:
    """Returns this rank's part in the TP.sync of its stage; all ranks of its tensor-parallel group call, two at least.

    It is what `TensorParallelGroup` takes. Tensors in host memory go over TCP, or over `groups.tensor`; those on a
    device always over the latter. Whoever closes it does so before the groups.

    Args:
        hosts: where the ranks are; None: a host for each.
        timeout: seconds that a rank may take to come, here and later.
    """
    tensor = groups.world.tensor
    peers = None
    if over_tcp:
        secret = tensor.share(secrets.token_hex(32))
        host = local_address()
        job = f"shards of stage {topology.pp_rank} of replica {topology.dp_rank}"
        peers = _C.RingPeers(topology.tp_rank, topology.tp, host, secret, job, tensor_parallel=True)
        endpoints = tensor.share(tensor.gather((host, peers.port)))
        with groups.world.progress.life.ending(peers):
            peers.connect(endpoints[topology.next_shard], timeout)
    return _C.TensorSync(
        groups.tensor.group_name,
        topology.tp_rank,
        topology.tp,
        arbiter,
        timeout,
        topology.describe(topology.rank),
        peers=peers,
        hosts=[] if hosts is None else list(hosts.shards),
    )


@dataclass(frozen=True, slots=True)
class PeerHosts:
    """Where those are with whom this rank exchanges messages and gradients; numbers that only tell hosts apart."""

    stages: tuple[int, ...]
    """Of this rank's replica."""
    replicas: tuple[int, ...]
    """Of this rank's stage."""
    shards: tuple[int, ...] = (0,)
    """Of this rank's stage in its replica."""
    messages: bool = True
    """Whether any replica of the job has stages on several hosts, whose messages take the cards."""


def find_hosts(groups: Groups) -> PeerHosts:
    """Returns who shares a host, and so a network card, with whom; all ranks of the job call."""
    host = host_identity()

    def numbers(group: Any) -> tuple[int, ...]:
        found = group.share(group.gather(host))
        return tuple(found.index(name) for name in found)

    world = groups.world
    stages = numbers(world.pipeline)
    messages = world.topology.pp > 1 and world.decide(len(set(stages)) > 1, any)
    return PeerHosts(stages=stages, replicas=numbers(world.data), shards=numbers(world.tensor), messages=messages)


def spread_of_shards(world: WorldGroup) -> int:
    """Returns on how many hosts the ranks of a tensor-parallel group lie, of the one with most; the same on every rank.
    All ranks of the job call."""
    topology = world.topology
    if topology.tp == 1:
        return 1
    groups = [topology.shards(replica, stage) for replica in range(topology.dp) for stage in range(topology.pp)]
    return world.decide(host_identity(), lambda hosts: max(len({hosts[rank] for rank in ranks}) for ranks in groups))


def warn_of_hosts(spread: int, topology: Topology, cost: str) -> None:
    """Says once what it costs where a tensor-parallel group has ranks on several hosts.

    Args:
        spread: from `spread_of_shards`.
        cost: what TP.sync was measured to take; empty where it was not.
    """
    if spread == 1 or topology.rank != 0:
        return
    logger.warning(
        "tp=%d: a tensor-parallel group is spread over %d hosts, so in every block, forward and backward, all wait "
        "for sums of activations over the network%s; start a multiple of %d processes on each host, or lower tp and "
        "raise pp",
        *(topology.tp, spread, f": {cost}" if cost else "", topology.tp),
    )


def join_nic_arbiter(
    topology: Topology,
    groups: Groups,
    job: str,
    preempt: bool,
    device: torch.device | None = None,
    *,
    gathers_first: bool = False,
) -> _C.NicArbiter:
    """Returns the arbiter that this host's ranks share, since they share its network card; all ranks of the job call.

    What lies on an accelerator leaves a host with several cards by the nearest: ranks with another one have an
    arbiter of their own.

    Args:
        job: names this engine; the same on every rank.
        device: where this rank's tensors lie; None: in host memory, which has one card.
        gathers_first: sums of gradients yield to gathers; the same on every rank.
    """
    if topology.world == 1:
        return _C.NicArbiter("", preempt)
    host = host_identity()
    card = f"{host} {nearest_cards(device)}" if device is not None else host

    def verdict(found: list[tuple[str, str]]) -> str:
        hosts, cards = ({one[k] for one in found} for k in (0, 1))
        # Nobody has to wait for another where each has a card, and where none is used.
        return "" if len(hosts) == 1 or len(cards) == topology.world else secrets.token_hex(8)

    token = groups.world.decide((host, card), verdict)
    if not token:  # known to all: else every rank goes on
        return _C.NicArbiter("", preempt, gathers_first)
    digest = hashlib.sha256(f"{job} {token} {card}".encode()).hexdigest()[:24]
    arbiter = _C.NicArbiter(f"fold3d-{digest}", preempt, gathers_first)
    try:
        groups.world.barrier()
    finally:  # everybody has it, or nobody will need it: the name can go, the memory lives as long as they do
        arbiter.unlink()
    return arbiter
