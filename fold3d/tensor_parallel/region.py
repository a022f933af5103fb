"""RegionOps: what the ranks of a tensor-parallel group exchange in a forward, by Megatron's names.

Between `copy_to_region` and `reduce_from_region` each rank computes a part of the same layers (Shoeybi et al.,
"Megatron-LM", 2019: f and g). What runs is one of several kinds: over the group, over all shards emulated on one
process to prove a split, or in two halves that take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


_OPS: Any = torch.ops.fold3d


class FusedOps(Protocol):
    """Called by every rank of the group in the same order; gradients flow through all of them.

    Weights are [in, out]. What an operation returns is what RegionOps' and a product, one after the other, return.
    """

    def copy_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """Returns the products of `x`, the same on every rank; its gradient is summed over the ranks while those of the
        weights are computed."""

    def all_gather_matmul(
        self, x: Tensor, weights: Sequence[Tensor], dim: int, length: int, known: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns everybody's `x` one after the other along `dim`, `length` in all, and its products; its gradient is
        this rank's part of everybody's sum.

        Args:
            known: everybody's `x`, where it is known already: then nothing is communicated before backward.
        """

    def matmul_all_reduce(self, x: Tensor, weight: Tensor, known: Tensor | None = None) -> Tensor:
        """Returns the sum of everybody's product; each rank's gradient is the sum's.

        Args:
            known: the result, where it is known already.
        """

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor, dim: int, known: Tensor | None = None) -> Tensor:
        """Returns this rank's part along `dim` of the sum of everybody's product; the gradient is everybody's.

        Args:
            known: the result, where it is known already.
        """


class GroupFusedOps:
    """FusedOps over a group, with Wang et al., "Overlap communication with dependent computation via decomposition in
    large deep learning models" (2023), as the source of the idea: the operators `torch.ops.fold3d.tp_*matmul*`."""

    def __init__(self, name: str) -> None:
        """Args:
        name: by which the operators know the group.
        """
        self._name = name

    def copy_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """See FusedOps."""
        products: list[Tensor] = _OPS.tp_copy_matmul(x, list(weights), self._name)
        return products

    def all_gather_matmul(
        self, x: Tensor, weights: Sequence[Tensor], dim: int, length: int, known: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """See FusedOps."""
        made: tuple[Tensor, list[Tensor]] = _OPS.tp_all_gather_matmul(x, list(weights), dim, length, self._name, known)
        return made

    def matmul_all_reduce(self, x: Tensor, weight: Tensor, known: Tensor | None = None) -> Tensor:
        """See FusedOps."""
        total: Tensor = _OPS.tp_matmul_all_reduce(x, weight, self._name, known)
        return total

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor, dim: int, known: Tensor | None = None) -> Tensor:
        """See FusedOps."""
        part: Tensor = _OPS.tp_matmul_reduce_scatter(x, weight, dim, self._name, known)
        return part


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


class LateRegion:
    """RegionOps that are given what they call later: forwards are put on a model before its ranks are connected."""

    def __init__(self, size: int, rank: int) -> None:
        self.size: int = size
        self.rank: int = rank
        self._ops: RegionOps | None = None

    def connect(self, ops: RegionOps) -> None:
        """Calls go to `ops` from now on. Raises: ValueError when these are of another group."""
        if (ops.size, ops.rank) != (self.size, self.rank):
            raise ValueError(f"rank {ops.rank} of {ops.size} is not rank {self.rank} of {self.size}")
        self._ops = ops

    @property
    def fused(self) -> FusedOps | None:
        """See RegionOps."""
        return self._connected().fused

    def copy_to_region(self, x: Tensor, channels: Tensor | None = None) -> Tensor:
        """See RegionOps."""
        return self._connected().copy_to_region(x, channels)

    def reduce_from_region(self, y: Tensor) -> Tensor:
        """See RegionOps."""
        return self._connected().reduce_from_region(y)

    def copy_weight(self, weight: Tensor, dim: int, indices: Tensor) -> Tensor:
        """See RegionOps."""
        return self._connected().copy_weight(weight, dim, indices)

    def exchange(self, x: Tensor, how: Exchange, known: Tensor | None = None) -> Tensor:
        """See RegionOps."""
        return self._connected().exchange(x, how, known)

    def _connected(self) -> RegionOps:
        if self._ops is None:
            raise RuntimeError("a block ran before its tensor-parallel group was connected")
        return self._ops
