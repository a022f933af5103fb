"""EmulatedGroup: all ranks of a tensor-parallel group on one thread, which take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import greenlet
import torch
from torch import Tensor

from fold3d.tensor_parallel.region import ALL_GATHER, REDUCE_SCATTER, Exchange
from fold3d.tensor_parallel.turns import ThreadState, switched


class EmulatedOps:
    """RegionOps of one emulated rank."""

    def __init__(self, group: EmulatedGroup, rank: int) -> None:
        self.size = group.size
        self.rank = rank
        self.fused = None
        self._group = group

    def copy_to_region(self, x: Tensor, channels: Tensor | None = None) -> Tensor:
        """See RegionOps."""
        return self._group.meet(self.rank, _Copy(-1, channels), x)

    def reduce_from_region(self, y: Tensor) -> Tensor:
        """See RegionOps."""
        return self._group.meet(self.rank, _Reduce(), y)

    def copy_weight(self, weight: Tensor, dim: int, indices: Tensor) -> Tensor:
        """See RegionOps."""
        return self._group.meet(self.rank, _Copy(dim, indices), weight)

    def exchange(self, x: Tensor, how: Exchange, known: Tensor | None = None) -> Tensor:
        """See RegionOps."""
        return self._group.meet(self.rank, _Exchange(how), x)


class EmulatedGroup:
    """Runs a function as every rank of a group; where one calls an operation, it waits until all others have, too.

    The ranks are greenlets, each with modes and a generator of random numbers of its own, which begin as the caller's.
    What they compute is one autograd graph, so one backward is that of all ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._main: Any = None
        self._waiting: dict[int, tuple[Any, Tensor]] = {}

    def run(self, as_rank: Callable[[EmulatedOps], Any]) -> list[Any]:
        """Returns what `as_rank` returns, by rank.

        Raises: RuntimeError when the ranks call different operations, or one returns while others wait; whatever
            `as_rank` raises.
        """
        results: dict[int, Any] = {}
        self._main = greenlet.getcurrent()
        self._waiting = {}

        begin = _state()

        def body(rank: int) -> None:
            begin.restore()
            results[rank] = as_rank(EmulatedOps(self, rank))

        ranks = [greenlet.greenlet(lambda rank=rank: body(rank)) for rank in range(self.size)]
        try:
            for one in ranks:
                switched(one.switch)
            while len(results) < self.size:
                answers = self._answer()
                for one, answer in zip(ranks, answers, strict=True):
                    switched(one.switch, answer)
        finally:
            for one in ranks:
                if one:
                    switched(one.throw, greenlet.GreenletExit)
            begin.restore()
        return [results[rank] for rank in range(self.size)]

    def meet(self, rank: int, operation: _Copy | _Reduce | _Exchange, x: Tensor) -> Tensor:
        """One rank's call of an operation; returns its result when all have called."""
        self._waiting[rank] = (operation, x)
        mine = _state()
        try:
            answer: Tensor = switched(self._main.switch)
        finally:
            mine.restore()
        return answer

    def _answer(self) -> Sequence[Tensor]:
        waiting, self._waiting = self._waiting, {}
        if len(waiting) < self.size:
            raise RuntimeError(f"ranks {sorted(waiting)} wait for a sum over {self.size}, the others have returned")
        calls = [waiting[rank] for rank in range(self.size)]
        kinds = {type(operation).__name__ for operation, _ in calls}
        shapes = {tuple(x.shape) for operation, x in calls if not operation.may_differ}
        if len(kinds) > 1 or len(shapes) > 1:
            raise RuntimeError(f"the ranks call different operations: {sorted(kinds)} on {sorted(shapes)}")
        tensors = [x for _, x in calls]
        answers: Sequence[Tensor] = calls[0][0].of_all([operation for operation, _ in calls], tensors)
        return answers


def _state() -> ThreadState:
    """Returns the modes and random numbers of the rank that runs, and takes the modes off."""
    return ThreadState([torch.default_generator])


class _Copy:
    def __init__(self, dim: int, indices: Tensor | None) -> None:
        self.dim, self.where = dim, indices

    @property
    def may_differ(self) -> bool:
        return self.where is not None

    @staticmethod
    def of_all(operations: Sequence[Any], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        copied: Sequence[Tensor] = _CopiedToRegion.apply([(o.dim, o.where) for o in operations], *tensors)  # type: ignore[no-untyped-call]
        return copied


class _Reduce:
    may_differ = False

    @staticmethod
    def of_all(operations: Sequence[Any], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        total = torch.stack([x.detach() for x in tensors]).sum(0)
        # Each rank's gradient is the sum's: the sum stands for its own summand. Without an in-place change of `total`,
        # which all of them would see.
        return [_Reduced.apply(x, total) for x in tensors]  # type: ignore[no-untyped-call]


class _Exchange:
    may_differ = True

    def __init__(self, how: Exchange) -> None:
        self.how = how

    @staticmethod
    def of_all(operations: Sequence[Any], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        hows = {operation.how for operation in operations}
        if len(hows) > 1:
            raise RuntimeError(f"the ranks call different operations: {hows}")
        exchanged: Sequence[Tensor] = _Exchanged.apply(operations[0].how, *tensors)  # type: ignore[no-untyped-call]
        return exchanged


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Exchange, *tensors: Tensor) -> Any:
        ctx.exchanged = how
        return tuple(_moved(how, how.forward, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *_moved(ctx.exchanged, ctx.exchanged.backward, gradients)


def _moved(how: Exchange, move: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    size = len(tensors)
    if move == ALL_GATHER:
        whole = torch.cat(list(tensors), how.dim)
        if whole.shape[how.dim] != how.length:
            raise RuntimeError(f"parts of {whole.shape[how.dim]} rows are no sequence of {how.length}")
        return [whole.clone() for _ in range(size)]
    if move == REDUCE_SCATTER:
        total = torch.stack(list(tensors)).sum(0)
        return [how.part(total, size, rank) for rank in range(size)]
    return [how.part(x, size, rank) for rank, x in enumerate(tensors)]


class _CopiedToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, where: Any, *tensors: Tensor) -> Any:
        ctx.copies = where
        return tuple(x.clone() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        parts = [
            gradient if indices is None else gradient.index_select(dim, indices)
            for (dim, indices), gradient in zip(ctx.copies, gradients, strict=True)
        ]
        total = torch.stack(parts).sum(0)
        summed = [
            total if indices is None else gradient.index_copy(dim, indices, total)
            for (dim, indices), gradient in zip(ctx.copies, gradients, strict=True)
        ]
        return None, *summed


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None
