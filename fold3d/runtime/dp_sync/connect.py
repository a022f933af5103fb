"""Connecting the replicas of a stage: rings for DP.sync, and the gate that the ranks of a host share."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fold3d import _C
from fold3d.runtime.groups import Groups
from fold3d.runtime.tcp import local_address
from fold3d.topology import Topology


def connect_replicas(
    topology: Topology,
    groups: Groups,
    gate: _C.HostGate,
    device: torch.device,
    timeout: float,
    *,
    over_tcp: bool,
) -> _C.BucketSync:
    """Returns this rank's part in the DP.sync of its stage; all replicas of the stage call.

    PP.sync may interrupt DP.sync every so many bytes as the measured bandwidth asks for.

    Args:
        timeout: seconds until a replica that does not come is an error.
    """
    links = None
    if over_tcp:
        secret: list[Any] = [secrets.token_hex(32) if topology.dp_rank == 0 else None]
        dist.broadcast_object_list(secret, topology.rank_of(0, topology.pp_rank), group=groups.data)
        host = local_address()
        links = _C.RingLinks(topology.dp_rank, topology.dp, host, secret[0])
        endpoints: list[Any] = [None] * topology.dp
        dist.all_gather_object(endpoints, (host, links.port), group=groups.data)
        links.connect(endpoints[(topology.dp_rank + 1) % topology.dp], timeout)
    return _C.BucketSync(
        topology.dp_rank,
        topology.dp,
        gate,
        device,
        timeout,
        topology.describe(topology.rank),
        chunk_bytes=0,
        links=links,
        reduce_group=groups.ring_names()["reduce"],
        gather_group=groups.ring_names()["gather"],
    )


def join_host_gate(topology: Topology, groups: Groups, job: str, preempt: bool) -> _C.HostGate:
    """Returns the gate that this host's ranks share, since they share its network card; all ranks of the job call.

    Args:
        job: names this engine; the same on every rank.
    """
    if topology.world == 1:
        return _C.HostGate("", preempt)
    host = _host_identity()
    hosts: list[Any] = [None] * topology.world
    dist.all_gather_object(hosts, host, group=groups.world)
    if len(set(hosts)) == topology.world:  # known to all: where any two share a host, every rank goes on
        return _C.HostGate("", preempt)
    token: list[Any] = [secrets.token_hex(8) if topology.rank == 0 else None]
    dist.broadcast_object_list(token, 0, group=groups.world)
    digest = hashlib.sha256(f"{job} {token[0]} {host}".encode()).hexdigest()[:24]
    gate = _C.HostGate(f"fold3d-{digest}", preempt)
    try:
        dist.barrier(group=groups.world)
    finally:  # everybody has it, or nobody will need it: the name can go, the memory lives as long as they do
        gate.unlink()
    return gate


def _host_identity() -> str:
    """Returns what ranks with the same network card have in common: the running system and its network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    system = boot.read_text().strip() if boot.exists() else os.uname().nodename
    namespace = Path("/proc/self/ns/net")
    return f"{system} {os.stat(namespace).st_ino if namespace.exists() else 0}"
