"""Facts: what one process finds out about its software and its machine, without asking any other."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import socket
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fold3d
from fold3d import _C
from fold3d.comms.interface import (
    address_of,
    address_of_name,
    host_identity,
    local_address,
    read_line,
    socket_interface,
)
from fold3d.device import pci_address, processes_of_host

_NET = Path("/sys/class/net")
_PROGRAM_SECONDS = 20.0
_GENERATIONS = {2.5: 0.25, 5.0: 0.5, 8.0: 0.985, 16.0: 1.969, 32.0: 3.938, 64.0: 7.563}
"""GT/s of a PCIe lane -> GB/s each way, after its encoding."""


@dataclass(frozen=True, slots=True)
class Card:
    """A network interface of this host that is up."""

    name: str
    address: str
    gbits: float | None
    """Per second; None: the system does not say."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU."""

    name: str
    memory: int
    """Bytes."""
    pcie: float | None
    """GB/s each way that its slot gives; None: nobody says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Of one process. Numbers are bytes unless they say otherwise."""

    host: str
    identity: str
    """Of the running system and its network: hosts may have the same name."""
    fold3d: str
    python: str
    torch: str
    built_for: str
    """torch that the extension was compiled against."""
    compiler: str
    nvcc: str | None
    """None: without CUDA kernels."""
    transformers: str
    cuda: str | None
    nccl: str | None
    cores: int
    processes: int
    """Of the job on this host."""
    memory: int
    available: int
    devices: tuple[Gpu, ...]
    nvlinks: int | None
    """Pairs of GPUs that NVLink joins; None: nobody says."""
    has_nvidia: bool
    """Whether the system has a driver of NVIDIA's, whatever torch sees."""
    mps: bool
    cards: tuple[Card, ...]
    address: str
    """That fold3d's connections listen at; or why there is none."""
    interface: str
    """GLOO_SOCKET_IFNAME."""
    own_name: str
    """Address that the host's own name leads to, which gloo tells other hosts unless GLOO_SOCKET_IFNAME is set; "" for
    none, and gloo takes the loopback address."""
    nccl_interface: str
    shm: int
    """/dev/shm as a whole."""
    shm_free: int
    open_files: int
    """Most at a time; -1: as many as it likes."""
    locked: int
    """Most memory that is locked; -1: as much as it likes."""
    max_connections: str
    """CUDA_DEVICE_MAX_CONNECTIONS."""
    module_loading: str
    """CUDA_MODULE_LOADING."""
    launch_order: str
    """NCCL_LAUNCH_ORDER_IMPLICIT."""
    threads: int


def share_host(one: Facts, other: Facts) -> bool:
    """Whether two ranks are on one host."""
    return (one.host, one.identity) == (other.host, other.identity)


def by_host(ranks: Sequence[Facts]) -> dict[str, list[Facts]]:
    """Returns the facts of each host's ranks, by its name; with its first rank behind, where several have one name."""
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank, facts in enumerate(ranks):
        hosts.setdefault((facts.host, facts.identity), []).append(rank)
    names = Counter(name for name, _ in hosts)
    return {
        name if names[name] == 1 else f"{name} (of rank {members[0]})": [ranks[rank] for rank in members]
        for (name, _), members in hosts.items()
    }


def find_facts() -> Facts:
    """Looks at the software and this host."""
    has_cuda = torch.cuda.is_available()
    built = _C.built_with()
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    try:
        address = local_address()
    except OSError as error:
        address = f"none ({error})"
    return Facts(
        host=socket.gethostname(),
        identity=host_identity(),
        fold3d=fold3d.__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        built_for=str(built["torch"]),
        compiler=str(built["compiler"]),
        nvcc=built["nvcc"],
        transformers=importlib.metadata.version("transformers"),
        cuda=torch.version.cuda,
        nccl=_nccl() if has_cuda else None,
        cores=len(os.sched_getaffinity(0)),
        processes=processes_of_host(),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available=_C.available_host_bytes(),
        devices=tuple(_device(k) for k in range(torch.cuda.device_count())) if has_cuda else (),
        nvlinks=nvlinks_of(_said("nvidia-smi", "topo", "-m")) if has_cuda else None,
        has_nvidia=os.path.exists("/dev/nvidiactl"),
        mps=os.path.exists(os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")),
        cards=tuple(_cards()),
        address=address,
        interface=socket_interface(),
        own_name=address_of_name(),
        nccl_interface=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        shm=shm.f_frsize * shm.f_blocks if shm else 0,
        shm_free=shm.f_frsize * shm.f_bavail if shm else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        module_loading=os.environ.get("CUDA_MODULE_LOADING", ""),
        launch_order=os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", ""),
        threads=torch.get_num_threads(),
    )


def nvlinks_of(topology: str | None) -> int | None:
    """Returns how many pairs of GPUs NVLink joins in what `nvidia-smi topo -m` says; None: it says nothing of GPUs."""
    if topology is None:
        return None
    rows = [line.split() for line in topology.splitlines() if re.match(r"GPU\d+\s", line)]
    if not rows:
        return None
    return sum(bool(re.fullmatch(r"NV\d+", cell)) for row in rows for cell in row[1 : 1 + len(rows)]) // 2


def pcie_speed(speed: str, width: str) -> float | None:
    """Returns GB/s each way of a slot, from its speed ("16.0 GT/s PCIe") and width ("16") in sysfs."""
    found = re.match(r"([\d.]+) GT/s", speed)
    lane = _GENERATIONS.get(float(found[1])) if found else None
    return lane * int(width) if lane and width.strip().isdecimal() and int(width) > 0 else None


def _device(number: int) -> Gpu:
    facts: Any = torch.cuda.get_device_properties(number)
    pci = str(pci_address(torch.device("cuda", number)))
    speed, width = (read_line(Path("/sys/bus/pci/devices") / pci / f"max_link_{what}") for what in ("speed", "width"))
    return Gpu(facts.name, facts.total_memory, pcie_speed(speed, width))


def _nccl() -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    library: Any = torch.cuda.nccl
    return ".".join(str(part) for part in library.version())


def _cards() -> list[Card]:
    found = []
    for name in sorted(path.name for path in _NET.iterdir()) if _NET.is_dir() else ():
        if name == "lo" or read_line(_NET / name / "operstate") not in ("up", "unknown"):
            continue
        try:
            address = address_of(name)
        except OSError:
            continue  # it has no IPv4 address
        speed = read_line(_NET / name / "speed")
        megabits = int(speed) if re.fullmatch(r"\d+", speed) else 0
        found.append(Card(name, address, megabits / 1e3 if megabits else None))
    return found


def _said(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PROGRAM_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
