"""advice(): what to change, from what was found and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fold3d.doctor.facts import Facts, by_host

_FEW_FILES = 4096
_SHM_PER_PROCESS = 64 << 20
"""NCCL's buffers between processes of a host take some tens of megabytes each."""
_ENOUGH = 0.5
"""Of what hardware should give: less has a cause that can be found."""


@dataclass(frozen=True, slots=True)
class Speed:
    """A speed, and what it should be."""

    what: str
    gbytes: float
    """GB/s."""
    expected: float | None
    """GB/s; None: nobody says."""
    remedy: str = ""
    """Where to look when it is slow."""

    @property
    def is_slow(self) -> bool:
        """Whether it is far from what it should be."""
        return self.expected is not None and self.gbytes < _ENOUGH * self.expected


def advice(ranks: Sequence[Facts]) -> list[str]:
    """Returns what to change by the facts, the most important first; empty where nothing is wrong.

    Args:
        ranks: of all ranks.
    """
    found = [*_of_the_job(ranks)]
    hosts = by_host(ranks)
    for name, members in hosts.items():
        found += [f"{name}: {text}" for text in _of_host(members[0], several=len(hosts) > 1)]
    return found


def too_slow(speeds: Sequence[Speed]) -> list[str]:
    """Returns which speeds are far from what they should be, and where to look."""
    return [
        f"{one.what}: {one.gbytes:.2f} GB/s, and the hardware should give {one.expected:.2f}; {one.remedy}"
        for one in speeds
        if one.is_slow
    ]


def _of_the_job(ranks: Sequence[Facts]) -> list[str]:
    found = []
    for name in ("fold3d", "torch", "transformers", "python", "cuda", "nccl", "nvcc"):
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks):
            values.setdefault(str(getattr(facts, name)), []).append(rank)
        if len(values) > 1:
            text = ", ".join(f"{value} on rank {_few(numbers)}" for value, numbers in values.items())
            found.append(f"versions of {name} differ: {text}; install the same on all hosts")
    kinds = {tuple(device.name for device in facts.devices) for facts in ranks}
    if len(kinds) > 1:
        found.append("hosts have different GPUs: the slowest one sets the pace; give each job hosts of one kind")
    return found


def _of_host(facts: Facts, *, several: bool) -> list[str]:
    found = []
    if facts.built_for.split("+")[0] != facts.torch.split("+")[0]:
        found.append(
            f"fold3d was built for torch {facts.built_for} and runs with {facts.torch}; build it again: "
            "pip install --no-build-isolation ."
        )
    if facts.has_nvidia and facts.cuda is None:
        found.append("there is an NVIDIA driver, but torch was built without CUDA; install a torch with CUDA")
    if facts.has_nvidia and facts.cuda is not None and not facts.devices:
        found.append("torch has CUDA but sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    if facts.devices and facts.nvcc is None:
        found.append('built without CUDA kernels, which kernels="fold3d" needs; install nvcc and build again')
    if facts.devices and facts.processes > len(facts.devices) and not facts.mps:
        found.append(
            f"{facts.processes} processes share {len(facts.devices)} GPU(s) without MPS, taking turns; start "
            "nvidia-cuda-mps-control -d, or one process per GPU"
        )
    if facts.max_connections == "1":
        found.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue: transfers wait behind kernels; unset it"
        )
    if facts.devices and facts.processes > 1 and facts.module_loading != "EAGER":
        found.append(
            "a kernel that is loaded when it is first used waits for those that run, which may wait for another rank; "
            "export CUDA_MODULE_LOADING=EAGER"
        )
    if facts.nccl and facts.processes > 1 and facts.launch_order != "1":
        found.append(
            "several threads launch NCCL's kernels, and NCCL keeps their order for all communicators of a GPU only if "
            "told to; export NCCL_LAUNCH_ORDER_IMPLICIT=1"
        )
    found += _of_network(facts, several=several)
    wanted = _SHM_PER_PROCESS * max(facts.processes, 1) if facts.devices else 1 << 20
    if facts.shm_free < wanted:
        found.append(
            f"/dev/shm has {facts.shm_free >> 20} MiB left, and {facts.processes} process(es) want "
            f"{wanted >> 20}; in a container: --shm-size=1g, or --ipc=host"
        )
    if 0 <= facts.open_files < _FEW_FILES:
        found.append(f"a process may open {facts.open_files} files and connections; ulimit -n 65536")
    if facts.devices and 0 <= facts.locked < 1 << 30:
        found.append(
            f"a process may lock {facts.locked >> 10} KiB of memory, which InfiniBand needs; ulimit -l unlimited"
        )
    if facts.threads * facts.processes > 2 * facts.cores:
        found.append(
            f"{facts.processes} process(es) with {facts.threads} threads each share {facts.cores} cores; "
            f"export OMP_NUM_THREADS={max(1, facts.cores // max(facts.processes, 1))}"
        )
    return found


def _of_network(facts: Facts, *, several: bool) -> list[str]:
    found = []
    names = [card.name for card in facts.cards]
    choose = f"export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, to one of {', '.join(names) or 'the host has none'}"
    if facts.address.startswith("none"):
        found.append(f"GLOO_SOCKET_IFNAME={facts.interface} has no IPv4 address: {facts.address[6:-1]}; {choose}")
    if not several:
        return found
    if facts.address.startswith("127."):
        found.append(f"other hosts would be told to connect to {facts.address}, which is this host itself; {choose}")
    elif not facts.interface and (facts.own_name or "127.").startswith("127."):
        found.append(
            f"its own name leads to {facts.own_name or 'no address'}, so gloo would tell other hosts to connect to "
            f"{'it' if facts.own_name else '127.0.0.1'}, which is this host itself; {choose}"
        )
    elif len(names) > 1 and not facts.interface:
        found.append(f"it has several network cards ({', '.join(names)}), and nobody says which; {choose}")
    if facts.devices and facts.interface and facts.nccl_interface and facts.interface != facts.nccl_interface:
        found.append(
            f"gloo takes {facts.interface} and NCCL {facts.nccl_interface}; if that is not meant, set "
            "NCCL_SOCKET_IFNAME to the same"
        )
    return found


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:4])
    return shown if len(numbers) <= 4 else f"{shown} and {len(numbers) - 4} more"
