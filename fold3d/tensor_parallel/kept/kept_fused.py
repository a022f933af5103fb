"""KeptFused: products that communicate while they compute do not communicate again where code runs again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fold3d.tensor_parallel.fused.ops import FusedOps


class Keeper(Protocol):
    """KeptSums, as it is used here."""

    def known(self) -> Tensor | None:
        """Returns what was kept, where code runs again."""

    def keep(self, made: Tensor) -> None:
        """Keeps what was summed or gathered, where code runs for the first time."""


class KeptFused:
    """FusedOps over others: what they sum and gather is kept with the rest of `sums`."""

    def __init__(self, ops: FusedOps, sums: Keeper) -> None:
        self._ops, self._sums = ops, sums

    def copy_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        return self._ops.copy_matmul(x, weights)

    def all_gather_matmul(
        self, x: Tensor, weights: Sequence[Tensor], dim: int, length: int, known: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        kept = self._sums.known()
        whole, products = self._ops.all_gather_matmul(x, weights, dim, length, kept if known is None else known)
        if kept is None:
            self._sums.keep(whole)
        return whole, products

    def matmul_all_reduce(self, x: Tensor, weight: Tensor, known: Tensor | None = None) -> Tensor:
        kept = self._sums.known()
        total = self._ops.matmul_all_reduce(x, weight, kept if known is None else known)
        if kept is None:
            self._sums.keep(total)
        return total

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor, dim: int, known: Tensor | None = None) -> Tensor:
        kept = self._sums.known()
        part = self._ops.matmul_reduce_scatter(x, weight, dim, kept if known is None else known)
        if kept is None:
            self._sums.keep(part)
        return part
