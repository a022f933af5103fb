"""Exchanges over a process group: every pair of ranks, and collectives; timed, and checked where streams order them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fold3d.device import synchronize
from fold3d.errors import RankError

_TIMES = 3
_SMALL = 1


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """Returns rounds in each of which every rank meets one other at most, so that all pairs meet once.

    The circle method: one rank stays, the others turn.
    """
    ranks = [*range(world + world % 2)]  # a number that is no rank: who meets it pauses
    out = []
    for _ in range(len(ranks) - 1):
        pairs = [(ranks[k], ranks[-1 - k]) for k in range(len(ranks) // 2)]
        out.append([(min(pair), max(pair)) for pair in pairs if max(pair) < world])
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return out


@contextmanager
def process_group(store: Any, rank: int, world: int, device: torch.device, timeout: float) -> Iterator[None]:
    """Makes the job's process group and ends it. Raises: RankError when the ranks do not connect."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    except Exception as error:
        raise RankError(
            f"rank {rank} does not connect to the others over {backend}: {error}; see the addresses above, and "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def meet_pairs(rank: int, world: int, device: torch.device, size: int, timeout: float) -> dict[int, float]:
    """Returns GB/s, both ways together, with each other rank; all ranks call.

    What is sent is still being computed when it is sent, and what arrives is read at once: only the order of streams
    is between them.

    Raises: RankError, naming the pair, when a message does not come or is not what was sent.
    """
    speeds = {}
    for pairs in rounds(world):
        other = next((sum(pair) - rank for pair in pairs if rank in pair), None)
        if other is not None:
            speeds[other] = _meet(rank, other, device, size, timeout)
    return speeds


def _meet(rank: int, other: int, device: torch.device, size: int, timeout: float) -> float:
    count = max(size // 4, _SMALL)
    best = float("inf")
    for turn in range(_TIMES):
        arriving = torch.zeros(count, device=device)
        synchronize(device)
        start = time.perf_counter()
        sent = _computed(rank, turn, count, device)
        try:
            works = _both_ways(rank, other, sent, arriving)
            for work in works:
                if not work.wait(timedelta(seconds=timeout)):
                    raise RuntimeError("it did not end in time")
        except RuntimeError as error:
            raise RankError(
                f"ranks {rank} and {other} do not exchange messages: {error}; look at the network between their hosts"
            ) from error
        right = (arriving == _value(other, turn)).all()
        if not bool(right):
            raise RankError(
                f"rank {rank} got other bytes from rank {other} than were sent: an exchange is not ordered by streams; "
                "look for the version of NCCL and the driver"
            )
        best = min(best, time.perf_counter() - start)
    return 2 * 4 * count / best / 1e9


def _both_ways(rank: int, other: int, sent: Tensor, arriving: Tensor) -> list[dist.Work]:
    ops = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, arriving, other)]
    return list(dist.batch_isend_irecv(ops if rank < other else ops[::-1]))


def _value(rank: int, turn: int) -> float:
    return float(1 + rank + 1000 * turn)


def _computed(rank: int, turn: int, count: int, device: torch.device) -> Tensor:
    """Returns the rank's value, at the end of kernels that take longer than a launch."""
    value = torch.full((count,), _value(rank, turn), device=device)
    if device.type != "cpu":
        matrix = torch.ones(1024, 1024, device=device)
        for _ in range(8):
            matrix = matrix @ matrix * 2**-10
        value = value * matrix.mean()
    return value


def collective_speeds(world: int, device: torch.device, size: int) -> dict[str, float]:
    """Returns GB/s that each rank sends in collectives of `size` bytes, as if round a ring; all ranks call."""
    count = max(size // 4 // world, 1) * world
    whole, part = torch.ones(count, device=device), torch.ones(count // world, device=device)
    bytes_sent = 4 * count * (world - 1) / world
    return {
        "all-reduce": 2 * bytes_sent / _fastest(device, lambda: dist.all_reduce(whole)) / 1e9,
        "reduce-scatter": bytes_sent / _fastest(device, lambda: dist.reduce_scatter_single(part, whole)) / 1e9,
        "all-gather": bytes_sent / _fastest(device, lambda: dist.all_gather_single(whole, part)) / 1e9,
    }


def copy_speeds(device: torch.device, size: int) -> dict[str, float]:
    """Returns GB/s of copies between pinned host memory and the device, or within host memory on the CPU."""
    there = torch.ones(max(size, 1), dtype=torch.uint8, device=device)
    if device.type == "cpu":
        here = torch.empty_like(there)
        return {"host to host": there.nbytes / _fastest(device, lambda: here.copy_(there)) / 1e9}
    here = torch.empty(there.shape, dtype=torch.uint8, pin_memory=True)
    return {
        "host to device": there.nbytes / _fastest(device, lambda: there.copy_(here, non_blocking=True)) / 1e9,
        "device to host": there.nbytes / _fastest(device, lambda: here.copy_(there, non_blocking=True)) / 1e9,
    }


def _fastest(device: torch.device, run: Callable[[], object]) -> float:
    run()  # connects, and touches the memory
    best = float("inf")
    for _ in range(_TIMES):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
