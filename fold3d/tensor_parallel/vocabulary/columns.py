"""Columns: which entries of a vocabulary a rank has, and how tensors get from a part to the whole and back."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn import functional

from fold3d.sharding.shard import Shard
from fold3d.tensor_parallel.region import RegionOps

logger = logging.getLogger(__name__)


class Columns:
    """Of one rank: the entries [first, first + length) of `size`. All ranks of the group make the same calls.

    All exchanges are sums over the ranks (`RegionOps`): a part with zeros around it, summed, is the whole, to the bit
    and for parts of any length.

    Raises: ValueError for a Shard whose parts are not one run each.
    """

    def __init__(self, shard: Shard, ops: RegionOps) -> None:
        runs = shard.parts[ops.rank]
        if len(runs) != 1 or shard.ranks != ops.size:
            raise ValueError(f"the entries {runs} of {shard.ranks} ranks are no run of one of {ops.size} ranks")
        self.ops, self.size = ops, shard.size
        self.first, self.end = runs[0]
        self._said: set[str] = set()

    @property
    def length(self) -> int:
        """How many entries this rank has."""
        return self.end - self.first

    def own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where in this rank's part the entries `ids` are (0 for others'), and which of them are there.

        Raises: IndexError for ids in host memory that are no entries, as torch's functions do; on devices an
            assertion of the device fails.
        """
        outside = (ids < 0) | (ids >= self.size)
        if ids.device.type != "cpu":
            torch._assert_async(~outside.any(), "an index is out of the vocabulary's range")
        elif bool(outside.any()):
            wrong = int(ids[outside][0])
            raise IndexError(f"index {wrong} is out of range: the vocabulary has {self.size} entries")
        mine = (ids >= self.first) & (ids < self.end)
        return (ids - self.first).masked_fill(~mine, 0), mine

    def add_up(self, share: Tensor) -> Tensor:
        """Returns the sum of everybody's `share`; each one's gradient is the sum's, which is the same on every rank."""
        if share.dtype.is_floating_point:
            return self.ops.reduce_from_region(share)
        # exact to 2^53; sums of integers are not what every way to exchange has
        return self.ops.reduce_from_region(share.double()).to(share.dtype)

    def gather(self, part: Tensor, along: int) -> Tensor:
        """Returns the whole tensor of which everybody has `part` along dimension `along`; the gradient is the own part
        of the whole's, which is the same on every rank."""
        behind = part.ndim - 1 - along
        return self.add_up(functional.pad(part, [0, 0] * behind + [self.first, self.size - self.end]))

    def scatter(self, whole: Tensor, along: int) -> Tensor:
        """Returns this rank's part, a view, of a tensor that all have; its gradient is whole on every rank."""
        return self.share(whole).narrow(along, self.first, self.length)

    def share(self, x: Tensor) -> Tensor:
        """Returns `x`, the same on every rank, for use with parts: its gradient is summed over the ranks."""
        return self.ops.copy_to_region(x) if x.requires_grad and torch.is_grad_enabled() else x

    def exchange(self, values: Tensor) -> Tensor:
        """Returns everybody's `values`, equally large, as [ranks, ...] in the order of ranks; the gradient of the own
        ones is that of their place."""
        none = torch.zeros_like(values)
        places = [values if rank == self.ops.rank else none for rank in range(self.ops.size)]
        return self.ops.reduce_from_region(torch.stack(places))

    def say_gathered(self, operation: str) -> None:
        """Logs, once per operation and on one rank of the group, why logits become whole in training."""
        if torch.is_grad_enabled() and self.ops.rank == 0 and operation not in self._said:
            self._said.add(operation)
            logger.warning(
                "'%s' needs the logits of the whole vocabulary: each rank of the tensor-parallel group gathers all %d "
                "columns. The usual losses (cross_entropy, log_softmax, nll_loss, logsumexp) do without",
                operation,
                self.size,
            )
