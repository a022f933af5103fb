"""TiedBuckets: the buckets of weights that several ranks of a replica hold, and sum over those, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fold3d.comms import abortable_collectives
from fold3d.data_parallel.bucket import Bucket
from fold3d.data_parallel.gradients import share_first
from fold3d.faults.progress import Progress
from fold3d.topology import Submesh, Topology


class TiedBuckets:
    """Of one rank, in an order that is the same on all ranks that hold them; these make the same calls."""

    def __init__(self, buckets: Sequence[Bucket], ties: Mapping[Submesh, Any], topology: Topology, progress: Progress):
        """Args:
        buckets: all of the rank's.
        ties: places of a replica that hold the same weights -> their group in this rank's replica.
        """
        self._topology, self._progress = topology, progress
        tied = sorted((b for b in buckets if b.spec.summed_over.is_shared), key=lambda bucket: bucket.names)
        self._members = [(bucket, ties[bucket.spec.summed_over]) for bucket in tied]

    def sum(self) -> None:
        """Adds up the shards of all copies, once they are means over the replicas."""
        for bucket, group in self._members:
            abortable_collectives.all_reduce(bucket.gradients[bucket.shard], group, self._progress)

    def share_first(self) -> None:
        """Gives all copies the first one's gradients: whoever changed them may have done otherwise on each."""
        for bucket, group in self._members:
            share_first(bucket.gradients, bucket.used, self._topology.source_of(bucket.spec.summed_over), group)

    def share_use(self) -> None:
        """A parameter counts as used when any copy was used."""
        for bucket, group in self._members:
            flags = torch.tensor(bucket.used, dtype=torch.uint8)
            abortable_collectives.all_reduce(flags, group, self._progress, dist.ReduceOp.MAX)
            bucket.set_used(flags.tolist())
