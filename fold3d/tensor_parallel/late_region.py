"""LateRegion: stands for a tensor-parallel group until the ranks are connected."""

from __future__ import annotations

from torch import Tensor

from fold3d.tensor_parallel.fused.ops import FusedOps
from fold3d.tensor_parallel.region import RegionOps
from fold3d.tensor_parallel.sequence.exchange import Exchange


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
