"""probe_links(): measures the network between the ranks of a job, by torch's process groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fold3d.plan.links import Links, measure_links

_FLOAT = 4  # bytes


def probe_links(
    *,
    device: torch.device,
    dp: int,
    pp: int,
    stage: int,
    activation_bytes: int,
    data_group: Any,
    pipe_group: Any,
    world_group: Any = None,
    seconds: float = 1.0,
    sum_up: Callable[[int], None] | None = None,
) -> Links:
    """Returns latency and bandwidth of PP.sync and DP.sync, the slowest of all ranks; all ranks of the job call it.

    All pipelines and all replicas measure at the same time, so ranks that share a network card share it here, too.

    Args:
        device: where the tensors that travel are.
        stage: this rank's.
        activation_bytes: of a pipeline message.
        data_group: the replicas of this stage (not used with dp == 1).
        pipe_group: the stages of this replica, group rank = stage (not used with pp == 1).
        world_group: all ranks; None is torch's default group.
        seconds: about how long to measure.
        sum_up: sums so many bytes over the replicas and waits for it; None: a ring of `data_group`, or its library's
            all-reduce on CUDA.
    Raises: RuntimeError from torch when a rank is gone.
    """

    def pass_on(size: int) -> None:
        # All stages at once: a message to the next stage, then one to the stage before, as in forward and backward.
        for step in (1, -1):
            ways = [(dist.irecv, stage - step), (dist.isend, stage + step)]
            message = [torch.zeros(max(1, size), dtype=torch.uint8, device=device) for _ in ways]
            _exchange(
                [(way, t, peer) for t, (way, peer) in zip(message, ways, strict=True) if 0 <= peer < pp], pipe_group
            )
        _wait(device)

    def ring(size: int) -> None:
        # What a ring of replicas sends, without the sums: gloo's own all-reduce is slower than fold3d's.
        mine = torch.zeros(max(1, size // dp), dtype=torch.uint8, device=device)
        other = torch.empty_like(mine)
        replica = dist.get_rank(data_group)
        for _ in range(2 * (dp - 1)):
            _exchange([(dist.irecv, other, (replica - 1) % dp), (dist.isend, mine, (replica + 1) % dp)], data_group)

    def all_reduce(size: int) -> None:
        dist.all_reduce(torch.zeros(max(1, size // _FLOAT), device=device), group=data_group)
        _wait(device)

    def slowest(values: list[float]) -> list[float]:
        # In host memory: the numbers are needed there, and gloo is at hand on every device.
        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=world_group)
        return [float(value) for value in found]

    return measure_links(
        pass_on=pass_on if pp > 1 else None,
        sum_up=(sum_up or (ring if device.type == "cpu" else all_reduce)) if dp > 1 else None,
        slowest=slowest,
        dp=dp,
        activation_bytes=activation_bytes,
        seconds=seconds,
    )


def _exchange(ways: list[tuple[Any, torch.Tensor, int]], group: Any) -> None:
    """Sends and receives at the same time; (dist.isend or dist.irecv, tensor, group rank of the other)."""
    operations = [dist.P2POp(way, tensor, group=group, group_peer=peer) for way, tensor, peer in ways]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
