"""TiedBuckets: the buckets of weights that several stages hold, whose gradients are summed over those, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fold3d.comms import abortable_collectives
from fold3d.data_parallel.bucket import Bucket
from fold3d.data_parallel.gradients import share_first
from fold3d.faults.progress import Progress
from fold3d.topology import Topology


class TiedBuckets:
    """Of one rank, in an order that is the same on all stages that hold them; these make the same calls."""

    def __init__(
        self, buckets: Sequence[Bucket], ties: Mapping[tuple[int, ...], Any], topology: Topology, progress: Progress
    ):
        """Args:
        buckets: all of the rank's.
        ties: stages that hold the same weights -> their group in this rank's pipeline.
        """
        self._topology, self._progress = topology, progress
        tied = sorted((b for b in buckets if len(b.spec.stages) > 1), key=lambda bucket: bucket.names)
        self._members = [(bucket, ties[bucket.spec.stages]) for bucket in tied]

    def sum(self) -> None:
        """Adds up the shards of the stages, once they are means over the replicas."""
        for bucket, group in self._members:
            abortable_collectives.all_reduce(bucket.gradients[bucket.shard], group, self._progress)

    def share_first(self) -> None:
        """Gives all copies the first stage's gradients: whoever changed them may have done otherwise on each."""
        for bucket, group in self._members:
            share_first(bucket.gradients, bucket.used, bucket.spec.stages, self._topology, group)

    def share_use(self) -> None:
        """A parameter counts as used when any stage used it."""
        for bucket, group in self._members:
            flags = torch.tensor(bucket.used, dtype=torch.uint8)
            abortable_collectives.all_reduce(flags, group, self._progress, dist.ReduceOp.MAX)
            bucket.set_used(flags.tolist())
