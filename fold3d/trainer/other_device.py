"""Accelerators of which accelerate has not heard: how the Trainer's arguments come to them all the same."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import PartialState

from fold3d.comms.shared_gloo import library_of
from fold3d.device import default_device, is_accelerator, make_current

_DEVICE, _AS_ON_CPU = "ACCELERATE_TORCH_DEVICE", "ACCELERATE_USE_CPU"


@contextlib.contextmanager
def other_device(timeout: float) -> Iterator[None]:
    """Within it accelerate's state is made for this process's accelerator, if accelerate does not know its kind: it
    counts the processes of a job only where it does, or on the CPU. All processes of a job of several call.

    Connects them (`init_process_group`) as accelerate does for the kinds that it knows, unless they are connected, so
    that device and host memory can be exchanged. Where accelerate knows the kind, nothing changes.

    Args:
        timeout: seconds, of the default process group.
    Raises: ConfigError where torch has no library for the accelerator's memory.
    """
    device = default_device()
    if not is_accelerator(device) or _known().type == device.type:
        yield
        return
    device = make_current(device)
    if not dist.is_initialized():
        backend = f"cpu:gloo,{device.type}:{library_of(device)}"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    before = {name: os.environ.get(name) for name in (_DEVICE, _AS_ON_CPU)}
    os.environ |= {_DEVICE: str(device), _AS_ON_CPU: "true"}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _known() -> torch.device:
    """Returns the device that accelerate would take."""
    found: torch.device = PartialState.default_device.fget(None)
    return found
