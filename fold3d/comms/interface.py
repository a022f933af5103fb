"""Where this rank can be reached: its network interface and address."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux: address of a network interface


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
