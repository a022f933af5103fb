"""Exchange, RegionOps: what the ranks of a tensor-parallel group exchange in a forward, by one verb.

In a region each rank computes a part of the same layers. What enters it is the same on every rank, and its gradient is
summed (COPY, Megatron's f); what leaves it is summed (REDUCE, Megatron's g; Shoeybi et al., "Megatron-LM", 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fold3d.sharding.shard import even_part

SAME = "same"
SUM = "sum"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
PART = "part"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the ranks of a tensor-parallel group do with a tensor, and with its gradient.

    "same": nothing; "sum": all get everybody's sum; "all_gather": everybody's parts become the whole;
    "reduce_scatter": a rank keeps its part of everybody's sum; "part": it keeps its part of what all have. Parts are
    consecutive; their lengths differ by one at most, the longer ones first.
    """

    forward: str
    backward: str
    dim: int = 0
    length: int = 0
    """Of the whole sequence, along `dim`; 0 where all have all of it."""
    indices: Tensor | None = field(default=None, compare=False)
    """Of `dim`, where a gradient is summed: elsewhere it is the same on every rank already. Ranks may hold different
    parts of a parameter: as many indices on each, in the same order, are summed. None: all."""

    @classmethod
    def copy(cls, dim: int, indices: Tensor | None) -> Exchange:
        """Returns COPY of which the gradient is summed at these indices of `dim` only; None: all."""
        return COPY if indices is None else cls(SAME, SUM, dim, indices=indices)

    @classmethod
    def gather(cls, dim: int, length: int, *, sums: bool) -> Exchange:
        """Returns that of parts which become the whole.

        Args:
            sums: whether the ranks have different shares of the whole one's gradient; else it is the same on each.
        """
        return cls(ALL_GATHER, REDUCE_SCATTER if sums else PART, dim, length)

    @classmethod
    def reduce_scatter(cls, dim: int, length: int) -> Exchange:
        """Returns that of summands, of whose sum each rank keeps a part."""
        return cls(REDUCE_SCATTER, ALL_GATHER, dim, length)

    @classmethod
    def scatter(cls, dim: int, length: int) -> Exchange:
        """Returns that of a tensor which is the same on every rank, and of which each keeps a part."""
        return cls(PART, ALL_GATHER, dim, length)

    @property
    def communicates(self) -> bool:
        """Whether a forward waits for other ranks."""
        return self.forward not in (SAME, PART)

    def part(self, x: Tensor, size: int, rank: int) -> Tensor:
        """Returns a rank's part of the whole, in memory of its own."""
        first, end = even_part(self.length, size, rank)
        return x.narrow(self.dim, first, end - first).clone(memory_format=torch.contiguous_format)

    def shape(self, x: Tensor, what: str, size: int, rank: int) -> list[int]:
        """Returns the shape of what a move makes of `x` on a rank."""
        first, end = even_part(self.length, size, rank)
        shape = list(x.shape)
        shape[self.dim] = self.length if what == ALL_GATHER else end - first
        return shape


COPY = Exchange(SAME, SUM)
REDUCE = Exchange(SUM, SAME)


class FusedOps(Protocol):
    """Products next to a region's borders, computed while the ranks exchange what they are made of (Wang et al.,
    "Overlap communication with dependent computation via decomposition in large deep learning models", 2023).

    Called by every rank of the group in the same order; gradients flow through all of them. Weights are [in, out]. What
    an operation returns is what an exchange and a product, one after the other, return.
    """

    def copy_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """Returns the products of `x`, the same on every rank; its gradient is summed over the ranks while those of the
        weights are computed."""

    def all_gather_matmul(
        self, x: Tensor, weights: Sequence[Tensor], dim: int, length: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns everybody's `x` one after the other along `dim`, `length` in all, and its products; its gradient is
        this rank's part of everybody's sum."""

    def matmul_all_reduce(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns the sum of everybody's product; each rank's gradient is the sum's."""

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor, dim: int) -> Tensor:
        """Returns this rank's part along `dim` of the sum of everybody's product; the gradient is everybody's."""


class RegionOps(Protocol):
    """Called by every rank of the group in the same order; gradients flow through. `TensorParallelGroup`, or all ranks
    emulated on one thread to prove a split (`EmulatedOps`)."""

    size: int
    """Ranks of the group."""
    rank: int
    """This one's place in it."""

    @property
    def fused(self) -> FusedOps | None:
        """None: products come before or after exchanges."""

    def exchange(self, x: Tensor, how: Exchange) -> Tensor:
        """Returns what `how` makes of `x`, which may be overwritten where it is summed."""
