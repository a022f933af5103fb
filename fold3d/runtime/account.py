"""Account: where one step's time went on this rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

NS_PER_MS = 1e6
RawRecord = tuple[str, str, int, int, int]
"""(lane, action text, start_ns, end_ns, bytes); times are this process's monotonic clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """One step on one rank; times in milliseconds, sizes in bytes."""

    step_ms: float
    """From the first action to the end of all communication."""
    compute_ms: float
    """Forward and backward passes."""
    exposed_pp_ms: float
    """Waiting for activations or gradients of other stages (transfer and bubble)."""
    exposed_dp_ms: float
    """Waiting after the last action for what is still under way: gradient sums and last sends."""
    hidden_dp_ms: float
    """Gradient sums that ran while the rank computed."""
    pp_bytes: int
    """Sent to other stages."""
    dp_bytes: int
    """Summed over the replicas."""
    records: tuple[RawRecord, ...]
    """Everything that was recorded, for the timeline."""


def make_account(records: Sequence[RawRecord], start_ns: int, end_ns: int) -> Account:
    """Returns the account of one step from the records of its compute lane and its transfers."""
    compute = [(start, end) for lane, _, start, end, _ in records if lane == "compute"]
    waits = [(action, start, end) for lane, action, start, end, _ in records if lane == "wait"]
    reduces = [(start, end) for lane, _, start, end, _ in records if lane == "reduce"]
    receives = sum(end - start for action, start, end in waits if "RECV" in action)
    final = sum(end - start for action, start, end in waits if "RECV" not in action)
    return Account(
        step_ms=(end_ns - start_ns) / NS_PER_MS,
        compute_ms=sum(end - start for start, end in compute) / NS_PER_MS,
        exposed_pp_ms=receives / NS_PER_MS,
        exposed_dp_ms=final / NS_PER_MS,
        hidden_dp_ms=overlap_ns(reduces, compute) / NS_PER_MS,
        pp_bytes=sum(size for lane, _, _, _, size in records if lane in ("send_f", "send_b")),
        dp_bytes=sum(size for lane, _, _, _, size in records if lane == "reduce"),
        records=tuple(records),
    )


def overlap_ns(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> int:
    """Returns for how long both lists of disjoint intervals are inside one of theirs, in their unit."""
    total, a, b = 0, sorted(first), sorted(second)
    i = j = 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def gather_records(records: Sequence[RawRecord], rank: int, world: int) -> list[list[dict[str, Any]]] | None:
    """Returns all ranks' records on one clock on rank 0, None elsewhere. Every rank of the job must call.

    Clocks of different machines are lined up at a barrier, so they agree to about the time a barrier takes.
    """
    if world > 1:
        dist.barrier()
    origin = time.monotonic_ns()
    mine = [
        {
            "rank": rank,
            "lane": lane,
            "action": action,
            "start_ns": start - origin,
            "end_ns": end - origin,
            "bytes": size,
        }
        for lane, action, start, end, size in records
    ]
    if world == 1:
        return [mine]
    gathered: list[list[dict[str, Any]]] | None = [[] for _ in range(world)] if rank == 0 else None
    dist.gather_object(mine, gathered)
    return gathered
