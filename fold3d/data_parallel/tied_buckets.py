"""TiedBuckets: the buckets of weights that several ranks of a replica hold, and sum over those, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fold3d.comms import abortable_collectives
from fold3d.data_parallel.bucket import Bucket
from fold3d.data_parallel.gradients import reduce_joined, share_first
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
        tied = [bucket for bucket in buckets if bucket.spec.summed_over.is_shared]
        by_places: dict[Submesh, list[Bucket]] = {}
        for bucket in sorted(tied, key=lambda bucket: (bucket.spec.summed_over, bucket.names)):
            by_places.setdefault(bucket.spec.summed_over, []).append(bucket)
        self._members = [(places, members, ties[places]) for places, members in by_places.items()]

    def sum(self) -> None:
        """Adds up the shards of all copies, once they are means over the replicas; what a group sums goes together."""
        for _, buckets, group in self._members:
            reduce = partial(abortable_collectives.all_reduce, group=group, progress=self._progress)
            reduce_joined([bucket.gradients[bucket.shard] for bucket in buckets], reduce)

    def share_first(self) -> None:
        """Gives all copies the first one's gradients: whoever changed them may have done otherwise on each."""
        for places, buckets, group in self._members:
            for bucket in buckets:
                share_first(bucket.gradients, bucket.used, self._topology.source_of(places), group)

    def share_use(self) -> None:
        """A parameter counts as used when any copy was used."""
        for _, buckets, group in self._members:
            flags = torch.tensor([used for bucket in buckets for used in bucket.used], dtype=torch.uint8)
            abortable_collectives.all_reduce(flags, group, self._progress, dist.ReduceOp.MAX)
            anywhere = iter(flags.tolist())
            for bucket in buckets:
                bucket.set_used([next(anywhere) for _ in bucket.used])
