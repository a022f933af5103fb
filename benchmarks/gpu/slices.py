"""(e): what slices cost a bucket's sums, which travel in them where messages of the pipeline take the same cards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.ranks import Sizes, Step, race
from fold3d import _C
from fold3d.comms.shared_gloo import new_group


def sums(rank: int, world: int, device: str, sizes: Sizes) -> dict[str, float]:
    """Returns the bytes per second that each replica sends of a bucket's sums, by system: in one, and in slices of what
    fold3d makes at the first one's speed."""
    here = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    bucket = torch.randn(world * 8 * sizes.width**2, device=here)
    sent = 4 * bucket.numel() * (world - 1) // world
    shard = bucket.chunk(world)[rank]
    apart = torch.empty_like(shard) if device == "cpu" else shard  # gloo does not sum in place

    def in_one() -> None:
        dist.reduce_scatter_single(apart, bucket)

    first = sent / race({"": in_one}, device, rounds=sizes.rounds, steps=sizes.steps)[""]
    agreed = torch.tensor([first], dtype=torch.float64, device=here)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    slice_bytes = _C.library_slice_bytes(world, float(agreed))
    rows = bucket.view(world, -1)
    length = max(slice_bytes // (4 * (world - 1)), 1)

    def copied() -> None:
        for part, own in zip(rows.split(length, 1), shard.split(length), strict=True):
            both = part.contiguous().view(-1)
            dist.reduce_scatter_single(own if device == "cuda" else torch.empty_like(own), both)

    whole, stop_whole = _fold3d(rank, world, here, bucket, 4 * bucket.numel())
    slices, stop_slices = _fold3d(rank, world, here, bucket, slice_bytes)
    name = f"in slices of {slice_bytes / 2**20:.2g} MiB"
    systems: dict[str, Step] = {
        "torch, in one": in_one,
        f"torch, {name}, copied": copied,
        "fold3d, in one": whole,
        f"fold3d, {name}": slices,
    }
    seconds = race(systems, device, rounds=sizes.rounds, steps=sizes.steps)
    stop_whole()
    stop_slices()
    return {system: sent / value for system, value in seconds.items()}


def _fold3d(
    rank: int, world: int, here: torch.device, bucket: Tensor, slice_bytes: int
) -> tuple[Step, Callable[[], None]]:
    groups = [new_group(range(world), timedelta(seconds=300), here, gloo=False, own_thread=True) for _ in range(2)]
    names = dict(zip(("reduce_group", "gather_group"), (group.group_name for group in groups), strict=True))
    sync: Any = _C.BucketSync(
        *(rank, world, _C.NicArbiter(), here, 300.0, f"replica {rank}"),
        slice_bytes=slice_bytes,
        **names,
        library=True,
    )
    numbers = itertools.count(1)

    def step() -> None:
        sync.begin(next(numbers), [])
        sync.reduce(0, bucket, 1.0)
        sync.wait_reduced(0)

    return step, sync.close
