"""Connecting the stages of a replica over TCP: where a rank listens and how the stages find each other."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING

import torch

from fold3d import _C
from fold3d.errors import ConfigError
from fold3d.topology import Topology

if TYPE_CHECKING:  # whose groups listen at socket_interface()
    from fold3d.comms.world_group import WorldGroup

_SIOCGIFADDR = 0x8915  # Linux: address of a network interface


def uses_tcp(transport: str, device: torch.device) -> bool:
    """Returns whether messages and sums travel over TCP links of our own. Raises: ConfigError if they cannot."""
    if transport == "tcp" and device.type != "cpu":
        raise ConfigError('transport="tcp" moves host memory, but parameters are on a GPU; use "c10d" or "auto"')
    return transport == "tcp" or (transport == "auto" and device.type == "cpu")


def socket_interface() -> str:
    """Returns the network interface that the user wants, as torch's own gloo groups take it; "" for any."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def local_address() -> str:
    """Returns the IPv4 address other ranks reach this one at.

    That of the interface GLOO_SOCKET_IFNAME if it is set, as for torch's own gloo groups; else the address this machine
    would use to reach MASTER_ADDR; else the loopback address.
    """
    interface = socket_interface()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        master = os.environ.get("MASTER_ADDR")
        if not master:
            return "127.0.0.1"
        probe.connect((master, int(os.environ.get("MASTER_PORT", "1")) or 1))  # a datagram socket: sends nothing
        return str(probe.getsockname()[0])


def connect_stages(topology: Topology, world: WorldGroup, timeout: float) -> _C.TcpLinks:
    """Returns this stage's links to its neighbours; all ranks of the replica call.

    Args:
        world: addresses and the links' secret travel over its connections.
        timeout: seconds until a stage that does not connect is an error.
    Raises: RuntimeError (CommError, or torch's own) when one cannot be reached, or the job has failed.
    """
    pipeline = world.pipeline
    secret = pipeline.share(secrets.token_hex(32))
    host = local_address()
    links = _C.TcpLinks(topology.pp_rank, topology.pp, host, secret, f"stages of replica {topology.dp_rank}")
    endpoints = pipeline.share(pipeline.gather((host, links.port)))
    with world.progress.ending(links):
        links.connect(
            endpoints[(topology.pp_rank + 1) % topology.pp], endpoints[(topology.pp_rank - 1) % topology.pp], timeout
        )
    return links
