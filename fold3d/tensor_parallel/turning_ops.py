"""TurningOps: TP.sync of functions that take turns: one's travels while the other computes, in forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fold3d.tensor_parallel.region import PART, Exchange, FusedOps, RegionOps
from fold3d.tensor_parallel.turns import Turns


class StartedSums(RegionOps, Protocol):
    """RegionOps that can also begin a sum and wait for it later."""

    def start_all_reduce(self, tensor: Tensor) -> Any:
        """Begins to sum everybody's `tensor`, contiguous, in place; returns what to wait for. Never blocks."""

    def wait(self, started: Any) -> None:
        """Returns when the sum is there. Raises: CommunicationError after the time limit."""

    def start_exchange(self, x: Tensor, how: Exchange, what: str) -> Callable[[], Tensor]:
        """Begins one of the moves of an exchange; returns what waits for its result. Never blocks."""


class TurningOps:
    """RegionOps over `group`. Outside of `turns` they are the group's own.

    Forward: a function starts its sum, lets the other one compute, and waits when it is its turn again. Backward is one
    pass of autograd over both functions' graphs: `copy_to_region` is two nodes, of which the first one reached starts
    the sum of the gradient and the second one waits. Autograd runs nodes in the order of their sequence numbers, the
    youngest first; the waiting node gets the number of the other function's newest one, so everything that the other
    one can compute meanwhile comes before it. An `exchange` communicates in both directions, so its two nodes lie on
    both sides of the turn of the other function as they are made.
    """

    def __init__(self, group: StartedSums, turns: Turns, fuses: Callable[[], bool] = lambda: False) -> None:
        """Args:
        fuses: whether products are fused where no functions take turns. It changes between steps only: where backward
            runs an activation checkpoint again, that must go as it went.
        """
        self.size, self.rank = group.size, group.rank
        self._fuses = fuses
        self._group, self.turns = group, turns
        self._newest: dict[int, int] = {}  # function -> sequence number of its newest waiting node

    def begin(self) -> None:
        """Functions begin to take turns."""
        self._newest.clear()

    @property
    def fused(self) -> FusedOps | None:
        return self._group.fused if self.turns.current is None and self._fuses() else None

    def copy_to_region(self, x: Tensor, channels: Tensor | None = None) -> Tensor:
        me = self.turns.current
        if me is None or not (torch.is_grad_enabled() and x.requires_grad):
            return self._group.copy_to_region(x, channels)
        sum_of = _GradientSum(self._group, channels)
        waited: Tensor = _Wait.apply(x, sum_of)  # type: ignore[no-untyped-call]
        node: Any = waited.grad_fn
        number = node._sequence_nr()
        others = [newest for function, newest in self._newest.items() if function != me]
        if others:
            node._set_sequence_nr(max(others))
        self._newest[me] = number
        started: Tensor = _Start.apply(waited, sum_of)  # type: ignore[no-untyped-call]
        return started

    def reduce_from_region(self, y: Tensor) -> Tensor:
        if self.turns.current is None:
            return self._group.reduce_from_region(y)
        started = self._group.start_all_reduce(y.detach())
        self.turns.hand_over()
        self._group.wait(started)
        return y

    def copy_weight(self, weight: Tensor, dim: int, indices: Tensor) -> Tensor:
        return self._group.copy_weight(weight, dim, indices)

    def exchange(self, x: Tensor, how: Exchange, known: Tensor | None = None) -> Tensor:
        if self.turns.current is None:
            return self._group.exchange(x, how, known)
        with_grad = torch.is_grad_enabled() and x.requires_grad
        back = _GradientExchange(self._group, how, x.shape)
        waited: Tensor = _Wait.apply(x, back) if with_grad else x  # type: ignore[no-untyped-call]
        finish = None if known is not None else self._group.start_exchange(x.detach(), how, how.forward)
        if how.forward != PART:
            self.turns.hand_over()
        made = known if finish is None else finish()
        assert made is not None
        if not with_grad:
            return made
        started: Tensor = _StartExchange.apply(waited, [made], back)  # type: ignore[no-untyped-call]
        return started


class _GradientExchange:
    """What becomes of one gradient in an exchange: started by one node, waited for by the next."""

    def __init__(self, group: StartedSums, how: Exchange, shape: torch.Size) -> None:
        self._group, self._how, self._shape = group, how, shape
        self._finish: Callable[[], Tensor] | None = None

    def start(self, gradient: Tensor) -> Tensor:
        self._finish = self._group.start_exchange(gradient, self._how, self._how.backward)
        return gradient.new_zeros(()).expand(self._shape)  # stands for what is on its way

    def wait(self, _: Tensor) -> Tensor:
        finish, self._finish = self._finish, None
        assert finish is not None, "autograd runs the node that starts an exchange first"
        return finish()


class _GradientSum:
    """The sum of one gradient over the ranks: started by one node, waited for by the next."""

    def __init__(self, group: StartedSums, channels: Tensor | None) -> None:
        self._group, self._channels = group, channels
        self._part: Tensor | None = None
        self._started: Any = None

    def start(self, gradient: Tensor) -> Tensor:
        # A copy: autograd may use what it hands us elsewhere, too.
        copied = gradient.clone(memory_format=torch.contiguous_format)
        self._part = copied if self._channels is None else copied[..., self._channels].contiguous()
        self._started = self._group.start_all_reduce(self._part)
        return copied

    def wait(self, gradient: Tensor) -> Tensor:
        self._group.wait(self._started)
        if self._channels is not None and self._part is not None:
            gradient[..., self._channels] = self._part
        self._part = self._started = None
        return gradient


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sum_of: _GradientSum | _GradientExchange) -> Tensor:
        ctx.sum_of = sum_of
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.sum_of.wait(gradient), None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sum_of: _GradientSum) -> Tensor:
        ctx.sum_of = sum_of
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.sum_of.start(gradient), None


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[Tensor], back: _GradientExchange) -> Tensor:
        ctx.back = back
        return made[0]  # in a list, so that it is no view of an argument: models add to what they get in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back.start(gradient), None, None
