"""copy_bandwidth(): how fast stashes leave a device and come back, measured."""

from __future__ import annotations

import os
import tempfile
import time

import torch

from fold3d.device import is_accelerator, synchronize

_BYTES = 16 << 20
_RUNS = 3


def copy_bandwidth(device: torch.device, disk: str | None) -> float:
    """Returns bytes per second between `device` and host memory, or a file in the folder `disk`; of the directions the
    slower. Any rank may call it alone.

    Ranks of a host that share the way to its memory measure at the same time, so each gets its share.

    Raises: OSError for a folder that cannot be written to.
    """
    if disk is not None:
        return _BYTES / _writing(disk)
    here = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    there = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=is_accelerator(device))
    out, back = (_copying(target, source, device) for target, source in ((there, here), (here, there)))
    return _BYTES / max(out, back)


def _copying(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    """Returns the seconds of a copy; the first of several is not counted."""
    times = []
    for _ in range(_RUNS + 1):
        begin = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _writing(disk: str) -> float:
    """Returns the seconds until so many bytes are on the disk."""
    with tempfile.TemporaryFile(dir=disk) as file:
        begin = time.perf_counter()
        file.write(bytes(_BYTES))
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - begin
