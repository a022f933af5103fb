"""EmulatedGroup: all ranks of a tensor-parallel group on one thread, which take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import greenlet
import torch
from torch import Tensor

from fold3d._C import same_origin
from fold3d.tensor_parallel.region import ALL_GATHER, REDUCE_SCATTER, SAME, SUM, Exchange
from fold3d.tensor_parallel.turns import ThreadState, switched


class EmulatedOps:
    """RegionOps of one emulated rank."""

    def __init__(self, group: EmulatedGroup, rank: int) -> None:
        self.size = group.size
        self.rank = rank
        self.fused = None
        self._group = group

    def exchange(self, x: Tensor, how: Exchange) -> Tensor:
        """See RegionOps."""
        made = self._group.meet(self.rank, how, x)
        same_origin(made, x)
        return made


class EmulatedGroup:
    """Runs a function as every rank of a group; where one calls an operation, it waits until all others have, too.

    The ranks are greenlets, each with modes and a generator of random numbers of its own, which begin as the caller's.
    What they compute is one autograd graph, so one backward is that of all ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._main: Any = None
        self._waiting: dict[int, tuple[Exchange, Tensor]] = {}

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

    def meet(self, rank: int, how: Exchange, x: Tensor) -> Tensor:
        """One rank's exchange; returns its result when all have called."""
        self._waiting[rank] = (how, x)
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
        hows, tensors = zip(*(waiting[rank] for rank in range(self.size)), strict=True)
        shapes = {tuple(x.shape) for how, x in zip(hows, tensors, strict=True) if not _may_differ(how)}
        if len(set(hows)) > 1 or len(shapes) > 1:
            raise RuntimeError(f"the ranks call different operations: {set(hows)} on {sorted(shapes)}")
        if hows[0].backward != SAME:
            exchanged: Sequence[Tensor] = _Exchanged.apply(hows, *tensors)  # type: ignore[no-untyped-call]
            return exchanged
        # Each rank's gradient is the sum's: the sum stands for its own summand.
        total = torch.stack([x.detach() for x in tensors]).sum(0)
        return [_Summed.apply(x, total) for x in tensors]  # type: ignore[no-untyped-call]


def _may_differ(how: Exchange) -> bool:
    """Whether what ranks exchange may be of different shapes."""
    return how.indices is not None or how.length > 0


def _state() -> ThreadState:
    """Returns the modes and random numbers of the rank that runs, and takes the modes off."""
    return ThreadState([torch.default_generator])


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hows: Sequence[Exchange], *tensors: Tensor) -> Any:
        ctx.hows = hows
        return tuple(x.clone() for x in tensors) if hows[0].forward == SAME else tuple(_moved(hows, True, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *_moved(ctx.hows, False, gradients)


def _moved(hows: Sequence[Exchange], forward: bool, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns what each rank gets; `hows` are alike but for their indices."""
    how, size = hows[0], len(tensors)
    move = how.forward if forward else how.backward
    if move == SUM:
        where = [(one.dim, one.indices) for one in hows]
        parts = [x if at is None else x.index_select(dim, at) for (dim, at), x in zip(where, tensors, strict=True)]
        total = torch.stack(parts).sum(0)
        return [
            total if at is None else x.index_copy(dim, at, total) for (dim, at), x in zip(where, tensors, strict=True)
        ]
    if move == ALL_GATHER:
        whole = torch.cat(list(tensors), how.dim)
        if whole.shape[how.dim] != how.length:
            raise RuntimeError(f"parts of {whole.shape[how.dim]} rows are no sequence of {how.length}")
        return [whole.clone() for _ in range(size)]
    if move == REDUCE_SCATTER:
        total = torch.stack(list(tensors)).sum(0)
        return [how.part(total, size, rank) for rank in range(size)]
    return [how.part(x, size, rank) for rank, x in enumerate(tensors)]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        return total.clone()  # without an in-place change of `total`, which all ranks would see

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None
