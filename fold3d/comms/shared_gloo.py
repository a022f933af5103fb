"""new_group(): torch.distributed.new_group, with one thread of gloo for all of them. Forked processes, such as the
workers of a data loader, keep none of the connections of the rank that forked them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from fold3d import _C
from fold3d.comms.interface import socket_interface
from fold3d.device import is_accelerator
from fold3d.errors import ConfigError


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes that are forked later do not keep the TCP connections that the body makes, torch's above all.

    A connection ends when nobody has it any more: a worker that outlives its killed rank would let the others wait. In
    a child the connection is replaced by /dev/null, if it is still the one that the body made. fold3d's own links need
    no such help.
    """
    before = _connections()
    try:
        yield
    finally:
        for descriptor, inode in _connections() - before:
            _C.keep_from_children(descriptor, inode)


def _connections() -> set[tuple[int, int]]:
    """Returns descriptor and inode of this process's TCP sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, the listing's own among them
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:[") and _is_tcp(int(name)):
                found.add((int(name), int(target[len("socket:[") : -1])))
    return found


def _is_tcp(descriptor: int) -> bool:
    one = socket.socket(fileno=os.dup(descriptor))
    with one:
        return one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM


_NAME = "fold3d_gloo"


def new_group(
    ranks: Sequence[int],
    timeout: timedelta,
    device: torch.device,
    *,
    gloo: bool,
    own_thread: bool,
    urgent: bool = False,
) -> Any:
    """Returns a group of `ranks` for the memory of `device`, and with `gloo` for that of the host; None elsewhere.

    torch gives every gloo group a device of its own, and every device a thread that wakes up 100 times a second even
    when nobody calls it. Where several ranks share a host's cores, the wake-ups of some groups per rank are a third of
    all and delay the passes. These groups share a device, unless `own_thread` is set: for tensors that are sent while
    those of other groups do.

    Collective: all ranks of the default group call it, in the same order.

    Args:
        urgent: what the group does on the device goes before what waits there, where its library can do that.
    """
    library = library_of(device) if is_accelerator(device) else None
    # Of the backends that are registered with torch and not torch's own, a group can have one: here the device's.
    kind = None if library is None else dist.Backend.backend_type_map.get(library)
    own_thread = own_thread or kind == dist.ProcessGroup.BackendType.CUSTOM
    with kept_from_children(), contextlib.nullcontext() if own_thread else _registered():
        backend = "gloo" if own_thread else _NAME
        if library is not None:
            backend = f"cpu:{backend},{device.type}:{library}" if gloo else library
        options = _urgent(library) if urgent else None
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options)
    return None if group == dist.GroupMember.NON_GROUP_MEMBER else group


def library_of(device: torch.device) -> str:
    """Returns the backend of torch.distributed for memory of an accelerator, such as "nccl".

    Raises: ConfigError where torch has none.
    """
    library = dist.Backend.default_device_backend_map.get(device.type)
    if library is None or library == dist.Backend.GLOO:  # which takes host memory alone
        raise ConfigError(
            f"torch has no library by which ranks exchange memory of the device {device}; set device='cpu' "
            "(use_cpu=True for the Trainer), or register a backend of torch.distributed for it"
        )
    return library


def _urgent(library: str | None) -> Any:
    if library != dist.Backend.NCCL:
        return None
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    # Only for as long: which backend torch takes for the user's own groups depends on whether there are others.
    dist.Backend.register_backend(_NAME, _make, extended_api=True, devices=["cpu"])
    try:
        yield
    finally:
        dist.Backend._plugins.pop(_NAME.upper(), None)


def connect_few(name: str, place: int, size: int, timeout: timedelta) -> Any:
    """Returns a group of a few ranks, each connected with each, that only its members make.

    It is ProcessGroupGloo itself, of which torch.distributed does not know, with one thread beside the shared one.

    Args:
        name: given to no other group of the job's store.
        place: this process's among the `size` members.
    """
    options = _options(timeout)
    options._threads = 1  # their calls come one after the other
    options.group_name = name
    store = PrefixStore(f"fold3d/{name}", dist.distributed_c10d._get_default_store())
    with kept_from_children():
        return dist.ProcessGroupGloo(store, place, size, options)


def _make(settings: Any, _: object) -> Any:
    options = _options(settings.timeout)
    options.global_ranks_in_group = settings.global_ranks_in_group
    options.group_name = settings.group_id
    return dist.ProcessGroupGloo(settings.store, settings.group_rank, settings.group_size, options)


def _options(timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs name its options otherwise
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [_device(socket_interface())]
    return options


@cache
def _device(interface: str) -> Any:
    """Returns this process's device on `interface`; without a name, where torch's own would be."""
    # Never one that connects when it is first used (TORCH_GLOO_LAZY_INIT): groups made this way wait for ever on those.
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
    return dist.ProcessGroupGloo.create_default_device(lazy_init=False)
