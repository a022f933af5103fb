"""Small collectives of a step which end at once when the job has failed; torch's own wait for their time limit."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fold3d.runtime.progress import Progress

_LOOK = timedelta(seconds=0.25)


def all_reduce(tensor: torch.Tensor, group: Any, progress: Progress, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduces `tensor` in place over `group`; every rank of it calls.

    Raises: ConnectionError when another rank has failed; what torch raises for a peer that is gone.
    """
    _finish(dist.all_reduce(tensor, op=op, group=group, async_op=True), tensor, progress)


def all_gather(shares: list[torch.Tensor], tensor: torch.Tensor, group: Any, progress: Progress) -> None:
    """Gathers everybody's `tensor` into `shares`, group order; every rank of `group` calls. Raises as `all_reduce`."""
    _finish(dist.all_gather(shares, tensor, group=group, async_op=True), tensor, progress)


def _finish(work: Any, tensor: torch.Tensor, progress: Progress) -> None:
    if tensor.device.type != "cpu":  # for these to wait is to queue the next kernel; they end with their group
        work.wait()
        return
    start = time.monotonic_ns()
    while not work.is_completed():
        try:
            work.wait(_LOOK)
        except RuntimeError:
            if progress.aborted is not None:
                raise ConnectionError(progress.aborted) from None
    progress.met.append((start, time.monotonic_ns()))
    work.wait()  # raises what went wrong
