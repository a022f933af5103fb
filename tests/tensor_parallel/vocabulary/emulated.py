"""Ranks of a tensor-parallel group as threads of this process, and a watch over the sizes of their tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.tensor_parallel.region import COPY, REDUCE, Exchange
from fold3d.tensor_parallel.vocabulary.column_parallel import ColumnParallel

T = TypeVar("T")
_SECONDS = 30.0


class _Copy(torch.autograd.Function):
    """Megatron's f over threads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ops: ThreadedOps) -> Tensor:
        ctx.ops = ops
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.ops.sum(gradients[0]), None


class _Reduce(torch.autograd.Function):
    """Megatron's g over threads."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ops: ThreadedOps) -> Tensor:
        return ops.sum(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class ThreadedOps(TensorParallelGroup):
    """The RegionOps of one of `size` threads, which meet in each sum; `sums` counts them."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, places: list[Any]) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size
        self.sums: list[tuple[int, ...]] = []
        self._barrier, self._places = barrier, places

    def exchange(self, x: Tensor, how: Exchange) -> Tensor:
        assert how in (COPY, REDUCE)
        out: Tensor = (_Copy if how == COPY else _Reduce).apply(x, self)
        return out

    def sum(self, x: Tensor) -> Tensor:
        self.sums.append(tuple(x.shape))
        self._places[self.rank] = x.detach().clone()
        self._barrier.wait(_SECONDS)
        total = torch.stack(list(self._places)).sum(0)
        self._barrier.wait(_SECONDS)
        return total


def on_ranks(size: int, function: Callable[[ThreadedOps], T]) -> list[T]:
    """Returns what `function(ops)` returned on each of `size` ranks; the first of them that raised ends all."""
    barrier, places = threading.Barrier(size), [None] * size

    def run(rank: int) -> T:
        try:
            return function(ThreadedOps(rank, size, barrier, places))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in causes or errors:
            raise error
        return [future.result() for future in futures]


class NothingWhole(TorchDispatchMode):
    """Fails where an operation makes a tensor with a dimension as long as the vocabulary."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, ColumnParallel) and leaf.device.type != "meta":
                assert self._size not in leaf.shape, f"{func} made a tensor of {tuple(leaf.shape)}"
        return result
