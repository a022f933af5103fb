"""new_group(): torch.distributed.new_group, with one thread of gloo for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from fold3d.runtime.tcp import socket_interface

_NAME = "fold3d_gloo"


def new_group(ranks: Sequence[int], timeout: timedelta, *, nccl: bool, own_thread: bool) -> Any:
    """Returns a group of `ranks`, for host memory and with `nccl` for CUDA memory as well; None elsewhere.

    torch gives every gloo group a device of its own, and every device a thread that wakes up 100 times a second even
    when nobody calls it. Where several ranks share a host's cores, the wake-ups of some groups per rank are a third of
    all and delay the passes. These groups share a device, unless `own_thread` is set: for tensors that travel while
    those of other groups do.

    Collective: all ranks of the default group call it, in the same order.
    """
    with contextlib.nullcontext() if own_thread else _registered():
        name = "gloo" if own_thread else _NAME
        group = dist.new_group(list(ranks), timeout=timeout, backend=f"cpu:{name},cuda:nccl" if nccl else name)
    return None if group == dist.GroupMember.NON_GROUP_MEMBER else group


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    # Only for as long: which backend torch takes for the user's own groups depends on whether there are others.
    dist.Backend.register_backend(_NAME, _make, extended_api=True, devices=["cpu"])
    try:
        yield
    finally:
        dist.Backend._plugins.pop(_NAME.upper(), None)


def _make(settings: Any, _: object) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs name its options otherwise
    options = gloo._Options()
    options._timeout = settings.timeout
    options._devices = [_device(socket_interface())]
    options.global_ranks_in_group = settings.global_ranks_in_group
    options.group_name = settings.group_id
    return gloo(settings.store, settings.group_rank, settings.group_size, options)


@cache
def _device(interface: str) -> Any:
    """Returns this process's device on `interface`; without a name, where torch's own would be."""
    # Never one that connects when it is first used (TORCH_GLOO_LAZY_INIT): groups made this way wait for ever on those.
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
    return dist.ProcessGroupGloo.create_default_device(lazy_init=False)
