"""Two replicas whose devices compute for long, or never come, and what is made of it: by the wait for a bucket's sum,
and by the engine."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fold3d import _C
from simdevice import sim
from tests.dist import late_jobs

DEVICE = torch.device("sim", 0)
LIMIT = 0.5
"""comm_timeout, in seconds."""
COMPUTE_MS = 1500.0
"""Longer than that."""
ELEMENTS = 1 << 12


def train(seconds: list[float], *, hangs: str = "", **settings: Any) -> dict[str, Any]:
    """As `late_jobs.train`; the device computes for so long, and the host is ahead of it.

    Args:
        hangs: "host": what replica 1 takes longer than replica 0 it takes before it launches anything.
    """

    def pause(mine: float) -> None:
        if hangs == "host":
            time.sleep(mine - seconds[0])
        sim.sleep(1e3 * (seconds[0] if hangs == "host" else mine))

    return late_jobs.train(seconds, pause, **settings)


@contextlib.contextmanager
def _sync(limit: float, *, makes_room: bool) -> Iterator[Any]:
    """A BucketSync of both, whose groups have far more time than it."""
    rank, names = dist.get_rank(), []
    for _ in range(2):
        group = dist.new_group(backend="simccl", timeout=timedelta(seconds=60))
        assert isinstance(group, dist.ProcessGroup)
        names.append(group.group_name)
    sync = _C.BucketSync(
        *(rank, 2, _C.NicArbiter(), DEVICE, limit, f"replica {rank}"),
        slice_bytes=0,
        reduce_group=names[0],
        gather_group=names[1],
        hosts=[0, 1],
        makes_room=makes_room,
    )
    try:
        yield sync
    finally:
        sync.close()
        torch.accelerator.synchronize()


@functools.cache
def _warm_up() -> None:
    """The first time torch imports what it needs for an operator, which takes longer than LIMIT."""
    with _sync(60.0, makes_room=True) as sync:
        sync.begin(1, [0])
        sync.reduce(0, torch.ones(ELEMENTS, device=DEVICE), 0.5)
        sync.wait_gathered(0)
        sync.drain()


def compute_for_long(*, makes_room: bool) -> float:
    """Each computes for longer than comm_timeout before its bucket is complete. Returns seconds until it was summed and
    gathered."""
    _warm_up()
    with _sync(LIMIT, makes_room=makes_room) as sync:
        dist.barrier()
        begin = time.monotonic()
        sim.sleep(COMPUTE_MS)
        gradients = torch.full((ELEMENTS,), float(dist.get_rank() + 1), device=DEVICE)
        sync.begin(1, [0])
        sync.reduce(0, gradients, 0.5)
        sync.wait_reduced(0)
        sync.wait_gathered(0)
        sync.drain()
        seconds = time.monotonic() - begin
        assert bool((gradients == 1.5).all().cpu())
        return seconds


def gather_sums(*, makes_room: bool, rounded: bool) -> None:
    """Gathers of buckets whose sums nobody has waited for, at once and once these are usable: they come behind."""
    _warm_up()
    with _sync(60.0, makes_room=makes_room) as sync:
        for step in range(1, 9):
            gradients = torch.full((ELEMENTS,), float(dist.get_rank() + step), device=DEVICE)
            sync.begin(step, [])
            sync.reduce(0, gradients, 0.5, rounded)
            if step % 2 == 0:
                time.sleep(0.1)
            sync.gather(0, gradients, rounded)
            sync.wait_gathered(0)
            sync.drain()
            assert bool((gradients == step + 0.5).all().cpu())


def wait_for_one(*, makes_room: bool, computes: bool) -> tuple[str, float]:
    """Replica 1 is not there: it computes, or has no bucket at all. Returns what replica 0 was told, and after how
    many seconds."""
    text, seconds = "", 0.0
    _warm_up()
    with _sync(LIMIT, makes_room=makes_room) as sync:
        sync.begin(1, [])
        gradients = torch.ones(ELEMENTS, device=DEVICE)
        torch.accelerator.synchronize()
        dist.barrier()
        if dist.get_rank() == 0:
            begin = time.monotonic()
            sync.reduce(0, gradients, 0.5)
            with pytest.raises(_C.CommError) as caught:
                sync.wait_reduced(0)
                sync.drain()
            text, seconds = str(caught.value), time.monotonic() - begin
        elif computes:
            sim.sleep(4 * COMPUTE_MS)
            gradients.add_(1)
            sync.reduce(0, gradients, 0.5)
        dist.barrier()
        if dist.get_rank() == 1:
            sync.is_gathered(0)  # what takes it so long is no failure of its own
            sync.abort("the other one has failed")
    return text, seconds
