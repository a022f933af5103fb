"""WorldGroup: what all ranks of a job exchange, in levels: over the replicas, over the stages, over the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fold3d.comms.tree_group import Combine, TreeGroup
from fold3d.device import default_device
from fold3d.errors import Fold3dError, RankError
from fold3d.faults.progress import Progress
from fold3d.topology import Topology

T = TypeVar("T")


class WorldGroup:
    """All ranks of a job: `data`, the replicas of this rank's stage and shard; `pipeline`, the stages of its replica at
    its place on the axis tp; `tensor`, the shards of its stage in its replica.

    Every rank of the job constructs it and makes the same calls in the same order. Up: over the replicas to replica 0,
    then over the stages of replica 0 to stage 0, then over its shards to rank 0; down the same way. So a sum is that
    over the shards, in the order of their tree, of the sums over the stages in the order of theirs, of those over the
    replicas in the order of theirs (`TreeGroup`), with the same bits on every rank; and a process is connected with at
    most 6 * `FAN_OUT` others, whatever the size of the job (4 * without shards). Raises as TreeGroup.
    """

    def __init__(self, topology: Topology, timeout: float, progress: Progress | None = None):
        """Args:
        timeout: seconds that a member may take to come, where a method is not told otherwise.
        progress: where this rank hears of failures.
        Raises: DistNetworkError when a rank does not come within the time limit of the default process group.
        """
        self.topology = topology
        self.progress = progress or Progress()
        self.patience = _patience() if topology.world > 1 else timeout
        number = _number(topology.rank) if topology.world > 1 else 0

        def group(ranks: list[int], name: str) -> TreeGroup:
            return TreeGroup(
                ranks,
                topology.rank,
                f"{number}/{name}",
                patience=self.patience,
                timeout=timeout,
                progress=self.progress,
            )

        dp, pp, tp = topology.coordinates(topology.rank)
        self.pipeline = group(topology.pipeline(dp), f"pipeline {dp} {tp}")
        self.data = group(topology.replicas(pp), f"data {pp} {tp}")
        self.tensor = group(topology.shards(dp, pp), f"tensor {dp} {pp}")

    def all_reduce(self, tensor: Tensor, combine: Combine = torch.add, *, timeout: float | None = None) -> None:
        """Combines everybody's `tensor`, in place. On a device, in the same levels, by its library where `TreeGroup`
        has one: each replica does then what else replica 0 does, and the host waits for nothing."""
        if tensor.device.type != "cpu":
            self.data.all_reduce(tensor, combine, timeout=timeout)
            self.all_reduce_replica(tensor, combine, timeout=timeout)
        elif self.topology.world > 1:
            total = self.data.reduce(tensor, combine, timeout=timeout)
            if self.data.is_first:
                self.all_reduce_replica(total, combine, timeout=timeout)
            self.data.broadcast(total, timeout=timeout)
            tensor.detach().copy_(total)

    def all_reduce_replica(self, tensor: Tensor, combine: Combine = torch.add, *, timeout: float | None = None) -> None:
        """Combines the `tensor` of all stages and shards of this rank's replica, in place; all ranks of it call. As
        `all_reduce` on a device."""
        if tensor.device.type != "cpu":
            self.pipeline.all_reduce(tensor, combine, timeout=timeout)
            self.tensor.all_reduce(tensor, combine, timeout=timeout)
            return
        total = self.pipeline.reduce(tensor, combine, timeout=timeout)
        if self.pipeline.is_first:
            self.tensor.all_reduce(total, combine, timeout=timeout)
        self.pipeline.broadcast(total, timeout=timeout)
        tensor.detach().copy_(total)

    def gather(self, value: Any, *, timeout: float | None = None) -> list[Any] | None:
        """Returns everybody's `value`, anything that pickles, by rank, on rank 0; None elsewhere."""
        replicas = self.data.gather(value, timeout=timeout)
        places = self.gather_replica(replicas, timeout=timeout) if self.data.is_first else None
        return None if places is None else [place[dp] for dp in range(self.topology.dp) for place in places]

    def gather_replica(self, value: Any, *, timeout: float | None = None) -> list[Any] | None:
        """Returns the `value` of all ranks of this one's replica, anything that pickles, in their order, on its first
        rank; None elsewhere. All ranks of the replica call."""
        stages = self.pipeline.gather(value, timeout=timeout)
        shards = self.tensor.gather(stages, timeout=timeout) if stages is not None else None
        return None if shards is None else [shard[stage] for stage in range(self.topology.pp) for shard in shards]

    def share(self, value: Any, *, timeout: float | None = None) -> Any:
        """Returns rank 0's `value`, anything that pickles, everywhere."""
        if self.data.is_first:
            value = self.share_replica(value, timeout=timeout)
        return self.data.share(value, timeout=timeout)

    def share_replica(self, value: Any, *, timeout: float | None = None) -> Any:
        """Returns the `value` of the first rank of this one's replica, anything that pickles; all ranks of it call."""
        if self.pipeline.is_first:
            value = self.tensor.share(value, timeout=timeout)
        return self.pipeline.share(value, timeout=timeout)

    def decide(self, value: Any, verdict: Callable[[list[Any]], T], *, timeout: float | None = None) -> T:
        """Returns everywhere what `verdict` makes of everybody's `value`, by rank, on rank 0.

        Raises: what it raises, on every rank; RankError for what is no error of fold3d's own.
        """
        shares = self.gather(value, timeout=timeout)
        outcome: tuple[T | None, Fold3dError | None] | None = None
        if shares is not None:
            try:
                outcome = verdict(shares), None
            except Fold3dError as error:
                outcome = None, error
            except Exception as error:  # the other ranks wait for an answer
                outcome = None, RankError(f"{self.topology.describe(0)} failed: {type(error).__name__}: {error}")
        found, wrong = self.share(outcome, timeout=timeout)
        if wrong is not None:
            raise wrong
        return cast(T, found)

    def barrier(self) -> None:
        """Returns when every rank has come."""
        self.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Ends the connections."""
        self.pipeline.close()
        self.data.close()
        self.tensor.close()


def _number(rank: int) -> int:
    """Returns the number of this group among those of the job, counted by this rank: all ranks make the same groups."""
    number: int = dist.distributed_c10d._get_default_store().add(f"fold3d/groups of {rank}", 1)
    return number


def _patience() -> float:
    """Returns the time limit of the default process group, in seconds."""
    group: Any = dist.distributed_c10d._get_default_group()
    for device in {"cpu", default_device().type} & {kind.type for kind in group._device_types}:
        with contextlib.suppress(AttributeError, RuntimeError):  # a backend of somebody else's
            return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
    return float(dist.default_pg_timeout.total_seconds())
