"""RegionOps: what the ranks of a tensor-parallel group exchange in a forward, by Megatron's names.

Between `copy_to_region` and `reduce_from_region` each rank computes a part of the same layers (Shoeybi et al.,
"Megatron-LM", 2019: f and g). What runs is one of several kinds: over the group, over all shards emulated on one
process to prove a split, or in two halves that take turns.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fold3d.tensor_parallel.fused.ops import FusedOps
from fold3d.tensor_parallel.sequence.exchange import Exchange


class RegionOps(Protocol):
    """Called by every rank of the group in the same order; gradients flow through all of them."""

    size: int
    """Ranks of the group."""
    rank: int
    """This one's place in it."""

    @property
    def fused(self) -> FusedOps | None:
        """What computes the products next to a region's borders while it communicates; None: nothing does, so that
        they come before or after."""

    def copy_to_region(self, x: Tensor, channels: Tensor | None = None) -> Tensor:
        """Returns `x`, the same on every rank; its gradient is summed over the ranks.

        Args:
            channels: indices of the last dimension; the gradient of others is the same on every rank already.
        """

    def reduce_from_region(self, y: Tensor) -> Tensor:
        """Returns the sum of everybody's `y`, which may be overwritten; each rank's gradient is the sum's."""

    def copy_weight(self, weight: Tensor, dim: int, indices: Tensor) -> Tensor:
        """Returns `weight`, whose gradient at `indices` of `dim` is summed over the ranks: what all of them hold of a
        parameter of which they hold different parts (`Shard.overlaps`)."""

    def exchange(self, x: Tensor, how: Exchange, known: Tensor | None = None) -> Tensor:
        """Returns what `how` makes of `x`, a whole sequence or a part of it.

        Args:
            known: the result, where it is known already: then nothing is communicated before backward.
        """
