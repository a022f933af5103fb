"""TensorParallelGroup: TP.sync among the ranks that share the weights of the same layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fold3d import _C
from fold3d.tensor_parallel.region import ALL_GATHER, PART, REDUCE_SCATTER, Exchange, FusedOps, GroupFusedOps

_OPS: Any = torch.ops.fold3d


class TensorParallelGroup:
    """RegionOps over a group, by Megatron's names (Shoeybi et al., 2019; Korthikanti et al., 2022).

    Every rank of the group makes the same calls in the same order, in forwards and in backwards. Results are the same
    on every rank, to the bit, and new tensors unless it is said otherwise. What runs are the operators
    `torch.ops.fold3d.tp_*`, which torch.compile does not look into. A dimension is split into consecutive parts whose
    lengths differ by one at most, the longer ones first.

    Raises: what the group's TensorSync raises (CommError), or torch's for a c10d group.
    """

    def __init__(self, group: Any):
        """Args:
        group: the group's `_C.TensorSync` (`connect_tensor_parallel`); or a c10d process group whose ranks are
            neighbours, or its name; None: this rank is alone.
        """
        self.size: int = 1
        self.rank: int = 0
        self.name = ""
        """By which the operators know it."""
        if isinstance(group, _C.TensorSync):
            self.size, self.rank, self.name = group.size, group.rank, group.group
        elif group is not None:
            if isinstance(group, str):
                group = torch._C._distributed_c10d._resolve_process_group(dist.GroupName(group))
            self.size, self.rank, self.name = group.size(), group.rank(), str(group.group_name)
        self.fused: FusedOps | None = GroupFusedOps(self.name) if self.size > 1 else None

    def copy_to_region(self, x: Tensor, channels: Tensor | None = None) -> Tensor:
        """Returns `x`, the same on every rank; its gradient is summed over the ranks (f).

        Args:
            channels: indices of the last dimension; the gradient of others is the same on every rank already.
        """
        if self.size == 1:
            return x
        if channels is None:
            copied: Tensor = _OPS.tp_copy_to_region(x, self.name)
            return copied
        return self.copy_weight(x, -1, channels)

    def copy_weight(self, weight: Tensor, dim: int, indices: Tensor) -> Tensor:
        """Returns `weight`, whose gradient at `indices` of `dim` is summed over the ranks.

        Ranks may hold different parts of a parameter: as many indices on each, in the same order, are summed.
        """
        if self.size == 1:
            return weight
        out: Tensor = _CopySome.apply(weight, self.name, dim, indices)  # type: ignore[no-untyped-call]
        return out

    def reduce_from_region(self, y: Tensor) -> Tensor:
        """Returns the sum of everybody's `y`; each rank's gradient is the sum's (g)."""
        if self.size == 1:
            return y
        total: Tensor = _OPS.tp_reduce_from_region(y, self.name)
        return total

    def gather_from_sequence_region(self, x: Tensor, dim: int, length: int | None = None) -> Tensor:
        """Returns everybody's `x` one after the other along `dim`; its gradient is this rank's part of the sum of
        everybody's.

        Args:
            length: of the result along `dim`; None: as if each `x` were as long as this one.
        """
        if self.size == 1:
            return x
        whole = x.shape[dim] * self.size if length is None else length
        gathered: Tensor = _OPS.tp_all_gather(x, dim, whole, self.name)
        return gathered

    def gather_from_region(self, x: Tensor, dim: int, length: int | None = None) -> Tensor:
        """Returns everybody's `x` one after the other along `dim`; its gradient, the same on every rank, is parted.

        Args:
            length: of the result along `dim`; None: as if each `x` were as long as this one.
        """
        if self.size == 1:
            return x
        return self._as_made(x, self.all_gather(x, dim, length), lambda g: self.scatter_to_sequence_region(g, dim))

    def reduce_scatter_to_sequence_region(self, y: Tensor, dim: int) -> Tensor:
        """Returns this rank's part along `dim` of the sum of everybody's `y`; the gradient is everybody's, gathered."""
        if self.size == 1:
            return y
        part: Tensor = _OPS.tp_reduce_scatter(y, dim, self.name)
        return part

    def scatter_to_sequence_region(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's part along `dim` of `x`, the same on every rank; the gradient is everybody's gathered."""
        if self.size == 1:
            return x
        part: Tensor = _OPS.tp_scatter(x, dim, self.name)
        return part

    def exchange(self, x: Tensor, how: Exchange, known: Tensor | None = None) -> Tensor:
        """Returns what `how` makes of `x`, a whole sequence or a part of it.

        Args:
            known: the result, where it is known already: then nothing is communicated before backward.
        """
        if self.size == 1:
            return x
        if known is not None:
            return self._as_made(x, known, lambda g: self.start_exchange(g, how, how.backward)())
        if how.forward == REDUCE_SCATTER:
            return self.reduce_scatter_to_sequence_region(x, how.dim)
        if how.forward == PART:
            return self.scatter_to_sequence_region(x, how.dim)
        if how.backward == PART:
            return self.gather_from_region(x, how.dim, how.length)
        return self.gather_from_sequence_region(x, how.dim, how.length)

    def start_exchange(self, x: Tensor, how: Exchange, what: str) -> Callable[[], Tensor]:
        """Begins one of the moves of an exchange, without a gradient; returns what waits for its result. Never
        blocks."""
        if self.size == 1 or what == PART:
            part = how.part(x, self.size, self.rank)
            return lambda: part
        x = x.detach()
        if what == ALL_GATHER:
            handle = _OPS.tp_all_gather_start(x, how.dim, how.length, self.name)
        else:
            handle = _OPS.tp_reduce_scatter_start(x, how.dim, self.name)
        size = how.shape(x, what, self.size, self.rank)

        def finish() -> Tensor:
            made: Tensor = _OPS.tp_wait(handle, x, size)
            return made

        return finish

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of everybody's `x`, without a gradient."""
        return self._reduced(x, "sum")

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Returns the elementwise maximum of everybody's `x`, without a gradient."""
        return self._reduced(x, "max")

    def all_gather(self, x: Tensor, dim: int, length: int | None = None) -> Tensor:
        """Returns what `gather_from_sequence_region` does, without a gradient."""
        return self.gather_from_sequence_region(x.detach(), dim, length)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's part along `dim` of the sum of everybody's `x`, without a gradient."""
        return self.reduce_scatter_to_sequence_region(x.detach(), dim)

    def start_all_reduce(self, tensor: Tensor) -> Tensor:
        """Begins to sum everybody's `tensor`, contiguous, in place; returns what to hand to `wait`. Never blocks.

        Until then nobody else writes to the tensor or reads it. Sums may be waited for in any order; they are made in
        the order in which they were started.
        """
        if self.size == 1:
            return tensor
        started: Tensor = _OPS.tp_all_reduce_start_(tensor.detach(), self.name)
        return started

    def wait(self, started: Tensor) -> None:
        """Returns when the sum that was started is there. Raises: CommError after the time limit."""
        if self.size > 1:
            _OPS.tp_finish(started)

    def _as_made(self, x: Tensor, made: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns `made`, a new tensor that came of `x`, whose gradient is what `back` makes of that of `made`."""
        out: Tensor = _Made.apply(x, [made], back)  # type: ignore[no-untyped-call]
        return out

    def _reduced(self, x: Tensor, op: str) -> Tensor:
        if self.size == 1:
            return x.detach().clone(memory_format=torch.contiguous_format)
        total: Tensor = _OPS.tp_all_reduce(x.detach(), self.name, op)
        return total


class _CopySome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, dim: int, indices: Tensor) -> Tensor:
        ctx.group, ctx.along = group, dim
        ctx.save_for_backward(indices)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (indices,) = ctx.saved_tensors
        total = _OPS.tp_reduce_from_region(gradient.index_select(ctx.along, indices), ctx.group)
        return gradient.index_copy(ctx.along, indices, total), None, None, None


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return made[0]  # in a list, so that it is no view of an argument: models add to what they get in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(gradients[0]), None, None
