"""Connecting the stages of a replica over TCP: how the stages find each other."""

from __future__ import annotations

import secrets

import torch

from fold3d import _C
from fold3d.comms.interface import local_address
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import ConfigError
from fold3d.topology import Topology, V


def uses_tcp(transport: str, device: torch.device) -> bool:
    """Returns whether messages and sums travel over TCP connections of our own. Raises: ConfigError if they cannot."""
    if transport == "tcp" and device.type != "cpu":
        raise ConfigError('transport="tcp" moves host memory, but parameters are on a GPU; use "c10d" or "auto"')
    return transport == "tcp" or (transport == "auto" and device.type == "cpu")


def connect_stages(topology: Topology, world: WorldGroup, timeout: float) -> _C.TcpPeers:
    """Returns this stage's connections to its neighbours; all ranks of the replica call.

    Args:
        world: addresses and the connections' secret travel over its connections.
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
