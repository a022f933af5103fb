"""Exchange: how a tensor goes from parts of the sequence to all of it, or back, and how its gradient returns."""

from __future__ import annotations

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


class SequenceOps(Protocol):
    """Of a tensor-parallel group, without gradients."""

    size: int
    rank: int

    def all_gather(self, x: Tensor, dim: int, length: int | None = None) -> Tensor:
        """Returns everybody's `x`, one after the other along `dim`, `length` in all."""

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's part along `dim` of the sum of everybody's `x`."""


def exchange(ops: SequenceOps, x: Tensor, how: Exchange, known: Tensor | None = None) -> Tensor:
    """Returns what `how` makes of `x`, with its gradient; all ranks call.

    Args:
        known: the result, where it is known already: then nothing is communicated now.
    """
    if ops.size == 1:
        return x
    made: Tensor = _Exchanged.apply(x, ops, how, known)  # type: ignore[no-untyped-call]
    return made


def move(ops: SequenceOps, x: Tensor, how: Exchange, what: str) -> Tensor:
    """Returns what one of the moves of an exchange makes of `x`, without a gradient."""
    if what == ALL_GATHER:
        return ops.all_gather(x, how.dim, how.length)
    if what == REDUCE_SCATTER:
        return ops.reduce_scatter(x, how.dim)
    return how.part(x, ops.size, ops.rank)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ops: SequenceOps, how: Exchange, known: Tensor | None) -> Tensor:
        ctx.exchanged = ops, how
        return move(ops, x.detach(), how, how.forward) if known is None else known.view_as(known)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ops, how = ctx.exchanged
        return move(ops, gradients[0], how, how.backward), None, None, None
