"""TensorParallelGroup: TP.sync among the ranks that share the weights of the same layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class TensorParallelGroup:
    """RegionOps over a process group, by Megatron's names (Shoeybi et al., 2019; Korthikanti et al., 2022).

    Every rank of the group makes the same calls in the same order, in forwards and in backwards. Results are the same
    on every rank, to the bit. A size that does not divide by that of the group is an error.
    """

    def __init__(self, group: Any):
        """Args:
        group: a c10d process group whose ranks are neighbours, or its name; None: this rank is alone.
        """
        if isinstance(group, str):
            group = torch._C._distributed_c10d._resolve_process_group(dist.GroupName(group))
        self._group = group
        self.size: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()

    def copy_to_region(self, x: Tensor, channels: Tensor | None = None) -> Tensor:
        """Returns `x`, the same on every rank; its gradient is summed over the ranks (f).

        Args:
            channels: indices of the last dimension; the gradient of others is the same on every rank already.
        """
        if self.size == 1:
            return x
        out: Tensor = _Copy.apply(x, self, -1, channels)  # type: ignore[no-untyped-call]
        return out

    def copy_weight(self, weight: Tensor, dim: int, indices: Tensor) -> Tensor:
        """Returns `weight`, whose gradient at `indices` of `dim` is summed over the ranks.

        Ranks may hold different parts of a parameter: as many indices on each, in the same order, are summed.
        """
        if self.size == 1:
            return weight
        out: Tensor = _Copy.apply(weight, self, dim, indices)  # type: ignore[no-untyped-call]
        return out

    def reduce_from_region(self, y: Tensor) -> Tensor:
        """Returns the sum of everybody's `y`; each rank's gradient is the sum's (g)."""
        if self.size == 1:
            return y
        out: Tensor = _Reduce.apply(y, self)  # type: ignore[no-untyped-call]
        return out

    def gather_from_sequence_region(self, x: Tensor, dim: int) -> Tensor:
        """Returns everybody's `x`, equally large, one after the other along `dim`; each gradient is the sum of
        everybody's for its part."""
        if self.size == 1:
            return x
        out: Tensor = _Gather.apply(x, self, dim)  # type: ignore[no-untyped-call]
        return out

    def reduce_scatter_to_sequence_region(self, y: Tensor, dim: int) -> Tensor:
        """Returns this rank's part along `dim` of the sum of everybody's `y`; the gradient is everybody's, gathered."""
        if self.size == 1:
            return y
        out: Tensor = _ReduceScatter.apply(y, self, dim)  # type: ignore[no-untyped-call]
        return out

    def scatter_to_sequence_region(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's part along `dim` of `x`, the same on every rank; the gradient is everybody's gathered."""
        if self.size == 1:
            return x
        out: Tensor = _Scatter.apply(x, self, dim)  # type: ignore[no-untyped-call]
        return out

    def start_all_reduce(self, tensor: Tensor) -> Any:
        """Begins to sum everybody's `tensor`, contiguous, in place; returns what `wait` takes. Never blocks."""
        if self.size == 1:
            return None
        return dist.all_reduce(tensor, group=self._group, async_op=True), tensor

    def wait(self, started: Any) -> None:
        """Returns when what was started is done."""
        if started is not None:
            started[0].wait()

    def gather_from_region(self, x: Tensor, dim: int) -> Tensor:
        """Returns everybody's `x`, equally large, one after the other along `dim`; its gradient, the same on every
        rank, is parted."""
        if self.size == 1:
            return x
        out: Tensor = _GatherAlike.apply(x, self, dim)  # type: ignore[no-untyped-call]
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of everybody's `x`, without a gradient."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Returns the elementwise maximum of everybody's `x`, without a gradient."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Returns everybody's `x`, equally large, one after the other along `dim`, without a gradient."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.detach().contiguous(), group=self._group)
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's part along `dim` of the sum of everybody's `x`, without a gradient."""
        return self.part(self.all_reduce(x), dim).contiguous()

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's equal part of `x` along `dim`, a view. Raises: ValueError when it does not divide."""
        length, rest = divmod(x.shape[dim], self.size)
        if rest:
            raise ValueError(f"{x.shape[dim]} elements along dimension {dim} are no {self.size} equal parts")
        return x.narrow(dim, self.rank * length, length)

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(total, op=op, group=self._group)
        return total


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup, dim: int, indices: Tensor | None) -> Tensor:
        ctx.group, ctx.along, ctx.indices = group, dim, indices
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if ctx.indices is None:
            return ctx.group.all_reduce(gradient), None, None, None
        total = ctx.group.all_reduce(gradient.index_select(ctx.along, ctx.indices))
        return gradient.index_copy(ctx.along, ctx.indices, total), None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: TensorParallelGroup) -> Tensor:
        return group.all_reduce(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup, dim: int) -> Tensor:
        ctx.group, ctx.along = group, dim
        return group.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.reduce_scatter(gradients[0], ctx.along), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: TensorParallelGroup, dim: int) -> Tensor:
        ctx.group, ctx.along = group, dim
        return group.reduce_scatter(y, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.all_gather(gradients[0], ctx.along), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup, dim: int) -> Tensor:
        ctx.group, ctx.along = group, dim
        return group.part(x, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.all_gather(gradients[0], ctx.along), None, None


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup, dim: int) -> Tensor:
        ctx.group, ctx.along = group, dim
        return group.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.part(gradients[0], ctx.along).clone(memory_format=torch.contiguous_format), None, None
