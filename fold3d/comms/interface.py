"""This rank's network interface: its host, the address where it can be reached, the cards nearest to its device."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from itertools import takewhile
from pathlib import Path

import torch

from fold3d.device import pci_address
from fold3d.errors import ConfigError

_SIOCGIFADDR = 0x8915  # Linux: address of a network interface
SYSFS = Path("/sys")


def socket_interface() -> str:
    """Returns the network interface that the user wants, as torch's own gloo groups take it; "" for any."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def local_address() -> str:
    """Returns the IPv4 address other ranks reach this one at.

    That of the interface GLOO_SOCKET_IFNAME if it is set, as for torch's own gloo groups; else the address this machine
    would use to reach MASTER_ADDR; else the loopback address.
    """
    interface, master = socket_interface(), os.environ.get("MASTER_ADDR")
    if interface:
        try:
            return address_of(interface)
        except OSError as error:
            raise ConfigError(
                f"the network interface {interface} has no IPv4 address ({error.strerror}), over which processes "
                "connect: set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to one that has"
            ) from None
    if not master:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, int(os.environ.get("MASTER_PORT", "1")) or 1))  # a datagram socket: sends nothing
        except socket.gaierror as error:
            raise ConfigError(
                f"MASTER_ADDR={master} leads to no IPv4 address ({error.strerror}), over which processes connect: give "
                "the IPv4 address of process 0's host, or set GLOO_SOCKET_IFNAME to the interface that has one"
            ) from None
        return str(probe.getsockname()[0])


def address_of(interface: str) -> str:
    """Returns the IPv4 address of a network interface. Raises: OSError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def host_identity() -> str:
    """Returns what ranks with the same network card have in common: the running system and its network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    system = boot.read_text().strip() if boot.exists() else os.uname().nodename
    namespace = Path("/proc/self/ns/net")
    return f"{system} {os.stat(namespace).st_ino if namespace.exists() else 0}"


def address_of_name() -> str:
    """Returns the IPv4 address that this host's own name leads to; "" where it leads nowhere.

    torch's gloo groups tell the other ranks this one where GLOO_SOCKET_IFNAME is not set; the loopback address where
    there is none.
    """
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def nearest_cards(device: torch.device, sysfs: Path = SYSFS) -> str:
    """Returns the names of the network cards that are nearest to `device`; "" where nobody says.

    Libraries such as NCCL send what lies on an accelerator through the card that shares most of its way over PCIe with
    it, InfiniBand's (or RoCE's) where there are any. Several that are equally near count as one card, in one text:
    which of them carries what is the library's choice. NCCL_IB_HCA and NCCL_SOCKET_IFNAME limit which there are.
    """
    address = pci_address(device)
    if address is None:
        return ""
    way = _way(sysfs / "bus/pci/devices" / address)
    # How many bridges the ways of card and device share, from the root on.
    pairs = {name: zip(way, place, strict=False) for name, place in _cards(sysfs).items()}
    common = {name: len(list(takewhile(lambda pair: pair[0] == pair[1], both))) for name, both in pairs.items()}
    most = max(common.values(), default=0)
    return "+".join(sorted(name for name, count in common.items() if count == most)) if way else ""


def _cards(sysfs: Path) -> dict[str, list[str]]:
    """Returns the cards that work, each with its place on the PCIe tree."""
    for folder, setting in (("infiniband", "NCCL_IB_HCA"), ("net", "NCCL_SOCKET_IFNAME")):
        paths = sorted((sysfs / "class" / folder).glob("*"))
        found = {path.name: _way(path / "device") for path in paths if (path / "device").exists() and _is_up(path)}
        found = {name: way for name, way in found.items() if _is_meant(name, os.environ.get(setting, ""))}
        if found:
            return found
    return {}


def _is_up(card: Path) -> bool:
    ports = [*card.glob("ports/*/state"), *card.glob("operstate")]
    return any(read_line(port).split(": ")[-1].lower() in ("active", "up", "unknown") for port in ports)


def _is_meant(name: str, setting: str) -> bool:
    """Whether a list of NCCL's has the name: it has beginnings of names, after "=" whole ones, after "^" others."""
    leaves_out = setting.startswith("^")
    words = [word.partition(":")[0] for word in setting.lstrip("^=").split(",") if word]
    is_whole = "=" in setting[:2]
    named = any(name == word if is_whole else name.startswith(word) for word in words)
    return named != leaves_out if words else True


def _way(place: Path) -> list[str]:
    """Returns the bridges from the root of the PCIe tree, and the place itself; empty where it is not on one."""
    parts = place.resolve().parts if place.exists() else ()
    return [part for part in parts if ":" in part]


def read_line(path: Path) -> str:
    """Returns what the system says in a file of one line; "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
