"""WorldGroup: what all ranks of a job exchange, in two levels: over the replicas, then over the stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fold3d.comms.tree import Tree
from fold3d.comms.tree_group import Combine, TreeGroup
from fold3d.errors import Fold3dError, RankError
from fold3d.faults.progress import Progress
from fold3d.topology import Topology

T = TypeVar("T")


class WorldGroup:
    """All ranks of a job: `data`, the replicas of this rank's stage, and `pipeline`, the stages of its replica.

    Every rank of the job constructs it and makes the same calls in the same order. Up: in every stage to replica 0,
    then over the stages of replica 0 to rank 0; down the same way. So a sum is that over the stages, in the order of
    their tree, of the sums over the replicas in the order of theirs (`TreeGroup`), with the same bits on every rank;
    and a process is connected with at most 4 * `tree.FAN_OUT` others, whatever the size of the job. Raises as
    TreeGroup.
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

        self.pipeline = group(topology.pipeline(topology.dp_rank), f"pipeline {topology.dp_rank}")
        self.data = group(topology.replicas(topology.pp_rank), f"data {topology.pp_rank}")

    def all_reduce(self, tensor: Tensor, combine: Combine = torch.add, *, timeout: float | None = None) -> None:
        """Combines everybody's `tensor`, in place."""
        if self.topology.world == 1:
            return
        total = self.data.reduce(tensor, combine, timeout=timeout)
        if self.data.is_first:
            self.pipeline.all_reduce(total, combine, timeout=timeout)
        self.data.broadcast(total, timeout=timeout)
        tensor.detach().copy_(total)

    def gather(self, value: Any, *, timeout: float | None = None) -> list[Any] | None:
        """Returns everybody's `value`, anything that pickles, by rank, on rank 0; None elsewhere."""
        replicas = self.data.gather(value, timeout=timeout)
        stages = self.pipeline.gather(replicas, timeout=timeout) if self.data.is_first else None
        return None if stages is None else [stage[r] for r in range(self.topology.dp) for stage in stages]

    def share(self, value: Any, *, timeout: float | None = None) -> Any:
        """Returns rank 0's `value`, anything that pickles, everywhere."""
        if self.data.is_first:
            value = self.pipeline.share(value, timeout=timeout)
        return self.data.share(value, timeout=timeout)

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

    def barrier(self, *, timeout: float | None = None) -> None:
        """Returns when every rank has come."""
        self.all_reduce(torch.zeros(1), timeout=timeout)

    def close(self) -> None:
        """Ends the connections."""
        self.pipeline.close()
        self.data.close()


def messages(dp: int, pp: int) -> int:
    """Returns how many messages one `all_reduce` of a job takes, up and down together."""
    return 2 * (pp * Tree(dp).one_way() + Tree(pp).one_way())


def rounds(dp: int, pp: int) -> int:
    """Returns how many exchanges in a family lie one after the other in an `all_reduce`."""
    return 2 * (Tree(dp).levels() + Tree(pp).levels())


def connections(topology: Topology) -> int:
    """Returns with how many others, counted once per group, this rank is connected."""
    data, pipeline = Tree(topology.dp), Tree(topology.pp)
    return data.connections(topology.dp_rank) + pipeline.connections(topology.pp_rank)


def _number(rank: int) -> int:
    """Returns how manieth group this is that the rank makes in this job: the same on all, who make the same calls."""
    number: int = dist.distributed_c10d._get_default_store().add(f"fold3d/groups of {rank}", 1)
    return number


def _patience() -> float:
    """Returns the time limit of the default process group, in seconds."""
    group: Any = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    try:
        limit = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # a backend of somebody else's
        limit = dist.default_pg_timeout
    return float(limit.total_seconds())
