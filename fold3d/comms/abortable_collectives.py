"""Small collectives of a step which end at once when the job has failed; torch's own wait for their time limit."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fold3d.faults.progress import Progress

_LOOK = timedelta(seconds=0.25)


def all_reduce(tensor: torch.Tensor, group: Any, progress: Progress, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduces `tensor` in place over `group`; every rank of it calls.

    Raises: DistNetworkError when another rank has failed; what torch raises for a peer that is gone.
    """
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    if tensor.device.type == "cpu":
        finish(work, progress)
    else:
        work.wait()  # which is to queue the next kernel; these end with their group


def finish(work: Any, progress: Progress) -> None:
    """Waits for a call on host memory. Raises as `all_reduce`."""
    start = time.monotonic_ns()
    while not work.is_completed():
        try:
            work.wait(_LOOK)
        except RuntimeError:
            if progress.life.failure is not None:
                raise dist.DistNetworkError(progress.life.failure) from None
    progress.met(start, time.monotonic_ns())
    work.wait()  # raises what went wrong
