"""Exchange: how a tensor goes from parts of the sequence to all of it, or back, and how its gradient returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fold3d.sharding.shard import even_part

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
PART = "part"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the ranks of a tensor-parallel group do with a tensor, and with its gradient.

    "all_gather": everybody's parts become the whole; "reduce_scatter": a rank keeps its part of everybody's sum;
    "part": it keeps its part of what all have.
    """

    forward: str
    backward: str
    dim: int
    length: int
    """Of the whole sequence."""

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

    def part(self, x: Tensor, size: int, rank: int) -> Tensor:
        """Returns a rank's part of the whole, in memory of its own."""
        first, end = even_part(self.length, size, rank)
        return x.narrow(self.dim, first, end - first).clone(memory_format=torch.contiguous_format)

    def shape(self, x: Tensor, what: str, size: int, rank: int) -> list[int]:
        """Returns the shape of what a move makes of `x` on a rank."""
        first, end = even_part(self.length, size, rank)
        length = self.length if what == ALL_GATHER else end - first
        return [*x.shape[: self.dim], length, *x.shape[self.dim + 1 :]]
