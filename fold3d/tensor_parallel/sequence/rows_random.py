"""RowsRandom: a part of the sequence draws the random numbers that the whole sequence would have drawn for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fold3d.errors import Fold3dError
from fold3d.sharding.shard import even_part
from fold3d.tensor_parallel.partial_draws import PartialDraws, Size


class RowsRandom(PartialDraws):
    """While it is entered, dropout and other random functions on tensors like the hidden state draw for the whole
    sequence and take this rank's part, so masks are those of one rank. Within a region they are left alone."""

    def __init__(
        self, shape: torch.Size, dim: int, length: int, size: int, rank: int, in_region: Callable[[], bool]
    ) -> None:
        """Args:
        shape: of this rank's part of the hidden state, whose sequence is `dim`.
        length: of the whole sequence.
        size: ranks of the tensor-parallel group.
        rank: this one's place in it.
        in_region: whether what runs is computed by each rank for its share of units.
        """
        super().__init__()
        self.used = False
        """Whether anything was drawn."""
        self._shape, self._dim, self._length = tuple(shape), dim % len(shape), length
        self._rows = even_part(length, size, rank)
        self._in_region = in_region

    def whole_of(self, size: Size, number: int) -> Size | None:
        if self._in_region():
            return None
        samples, rows = self._shape[0], self._shape[self._dim]
        any_width = rows > 1  # else other tensors look like a hidden state, too
        if size == self._shape or (any_width and size[:-1] == self._shape[:-1]):
            return (*size[: self._dim], self._length, *size[self._dim + 1 :])
        folded = (samples * rows, *self._shape[2:])  # samples and their sequences in one dimension
        if self._dim == 1 and (size == folded or (any_width and size[:-1] == folded[:-1])):
            return (samples * self._length, *size[1:])
        if math.prod(size) > samples and (rows in size or rows * samples in size):
            raise Fold3dError(
                f"sequence_parallel: random numbers of the size {tuple(size)} are drawn on {rows} of {self._length} "
                f"rows of the sequence, for {samples} samples, and it is not known which of the whole sequence's. Set "
                "sequence_parallel=False, or the chance to 0"
            )
        return None

    def part(self, drawn: Tensor) -> Tensor:
        self.used = True
        rows = self._rows_of(drawn)
        return rows.flatten(0, 1) if drawn.dim() < len(self._shape) else rows

    def put(self, whole: Tensor, part: Tensor) -> None:
        rows = self._rows_of(whole)
        rows.copy_(part.reshape(rows.shape))

    def _rows_of(self, whole: Tensor) -> Tensor:
        """Returns a view of this rank's rows, with a dimension for the samples, where `whole` has none, in front."""
        first, end = self._rows
        if whole.dim() < len(self._shape):
            whole = whole.view(self._shape[0], self._length, *whole.shape[1:])
        return whole.narrow(self._dim, first, end - first)
