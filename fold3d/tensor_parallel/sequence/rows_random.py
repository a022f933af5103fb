"""RowsRandom: a part of the sequence draws the random numbers that the whole sequence would have drawn for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
        like = size == self._shape if self._shape[self._dim] < 2 else size[:-1] == self._shape[:-1]
        if not like or self._in_region():
            return None
        return (*size[: self._dim], self._length, *size[self._dim + 1 :])

    def part(self, drawn: Tensor) -> Tensor:
        self.used = True
        first, end = self._rows
        return drawn.narrow(self._dim, first, end - first)
