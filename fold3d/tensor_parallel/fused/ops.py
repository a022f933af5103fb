"""FusedOps: the matrix products next to a region's borders, computed while their inputs or results travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

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
