"""TensorParallelGroup: TP communication among the ranks that share the weights of the same layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fold3d import _C
from fold3d._C import same_origin
from fold3d.errors import ConfigError
from fold3d.tensor_parallel.kept_exchanges import KeptExchanges
from fold3d.tensor_parallel.operators import of_fold3d
from fold3d.tensor_parallel.region import ALL_GATHER, PART, REDUCE_SCATTER, SAME, SUM, Exchange
from fold3d.tensor_parallel.turns import Turns
from fold3d.torch_private import place_in_backward, set_place_in_backward

_OPS: Any = torch.ops.fold3d


class TensorParallelGroup:
    """RegionOps over a group (Shoeybi et al., 2019; Korthikanti et al., 2022).

    Every rank of the group makes the same calls in the same order, in forwards and in backwards. Results are the same
    on every rank, to the bit, and new tensors unless it is said otherwise. What runs are the operators
    `torch.ops.fold3d.tp_*`, which torch.compile does not look into. Where code runs again nothing is communicated
    (`kept`), and of functions that take turns (`turns`) one's exchange runs while another one computes.

    Raises: what the group's TensorSync raises (CommError), or torch's for a c10d group.
    """

    def __init__(self, group: Any, fuses: Callable[[], bool] = lambda: False):
        """Args: see `connect`."""
        self.size: int = 1
        self.rank: int = 0
        self.name = ""
        """By which the operators know it."""
        self.turns = Turns()
        self.kept = KeptExchanges(self.turns)
        self._newest: dict[int, int] = {}  # function that takes turns -> place in backward of its newest waiting node
        self.connect(group, fuses)

    @classmethod
    def of(cls, size: int, rank: int) -> TensorParallelGroup:
        """Returns one that is not connected yet: forwards can be put on a model, and cannot run."""
        made = cls(None)
        made.size, made.rank = size, rank
        return made

    def connect(self, group: Any, fuses: Callable[[], bool] = lambda: False) -> None:
        """Exchanges go over `group` from now on.

        Args:
            group: the group's `_C.TensorSync` (`connect_tensor_parallel`); or a c10d process group whose ranks are
                neighbours, or its name; None: this rank is alone.
            fuses: whether products are fused where no functions take turns. It changes between steps only: where
                backward runs an activation checkpoint again, that must go as it went.
        """
        if isinstance(group, _C.TensorSync):
            self.size, self.rank, self.name = group.size, group.rank, group.group
        elif group is not None:
            if isinstance(group, str):
                group = torch._C._distributed_c10d._resolve_process_group(dist.GroupName(group))
            self.size, self.rank, self.name = group.size(), group.rank(), str(group.group_name)
        self._fuses, self._fused = fuses, GroupFusedOps(self.name, self.kept)

    @property
    def fused(self) -> GroupFusedOps | None:
        """See RegionOps."""
        return self._fused if self.size > 1 and self.turns.current is None and self._fuses() else None

    def begin_turns(self) -> None:
        """Functions begin to take turns."""
        self._newest.clear()

    def exchange(self, x: Tensor, how: Exchange) -> Tensor:
        """See RegionOps."""
        make = self.exchange_at_once if self.turns.current is None else self._exchange_in_turns
        with of_fold3d():
            if how.communicates:
                made = self.kept.recall(lambda known: make(x, how, known))
            else:
                made = make(x, how, None)
        same_origin(made, x)
        return made

    def exchange_at_once(self, x: Tensor, how: Exchange, known: Tensor | None = None) -> Tensor:
        """Returns what `how` makes of `x`.

        Args:
            known: the result, where it is known already: then nothing is communicated before backward.
        """
        if self.size == 1:
            return x
        if not self.name:
            raise RuntimeError("a block ran before its tensor-parallel group was connected")
        if known is not None:
            if how.forward == SUM:
                x.detach().copy_(known)
                return x
            made: Tensor = _Made.apply(x, [known.clone()], lambda g: self.start(g, how, how.backward)())  # type: ignore[no-untyped-call]
        elif how.forward == SAME and how.indices is not None:
            made = _CopySome.apply(x, self.name, how.dim, how.indices)  # type: ignore[no-untyped-call]
        elif how.forward == SAME:
            made = _OPS.tp_copy_to_region(x, self.name)
        elif how.forward == SUM:
            made = _OPS.tp_reduce_from_region(x, self.name)
        elif how.forward == REDUCE_SCATTER:
            made = _OPS.tp_reduce_scatter(x, how.dim, self.name)
        elif how.forward == PART:
            made = _OPS.tp_scatter(x, how.dim, self.name)
        elif how.backward == PART:
            gathered = _OPS.tp_all_gather(x.detach(), how.dim, how.length, self.name)
            made = _Made.apply(x, [gathered], lambda g: _OPS.tp_scatter(g, how.dim, self.name))  # type: ignore[no-untyped-call]
        else:
            made = _OPS.tp_all_gather(x, how.dim, how.length, self.name)
        return made

    def start(self, x: Tensor, how: Exchange, move: str) -> Callable[[], Tensor]:
        """Begins one of the moves of an exchange, without a gradient; returns what waits for its result. Never blocks.

        A sum is made in place, of a contiguous tensor: until it is there nobody else writes to that or reads it. Moves
        may be waited for in any order; they are made in the order in which they were started.
        """
        x = x.detach()
        if self.size == 1 or move == PART:
            here = x if move == SUM else how.part(x, self.size, self.rank)
            return lambda: here
        if move == SUM:
            started = _OPS.tp_all_reduce_start_(x, self.name)

            def summed() -> Tensor:
                _OPS.tp_finish(started)
                return x

            return summed
        if move == ALL_GATHER:
            handle = _OPS.tp_all_gather_start(x, how.dim, how.length, self.name)
        else:
            handle = _OPS.tp_reduce_scatter_start(x, how.dim, self.name)
        shape = how.shape(x, move, self.size, self.rank)

        def moved() -> Tensor:
            made: Tensor = _OPS.tp_wait(handle, x, shape)
            return made

        return moved

    def _exchange_in_turns(self, x: Tensor, how: Exchange, known: Tensor | None) -> Tensor:
        """Does what `exchange_at_once` does in one of several functions that take turns.

        Forward: the function starts its exchange, lets the other one compute, and waits when it is its turn again; they
        hand over at the same places when the result is known, so that backward finds the same graph. Backward is one
        pass of autograd over both functions' graphs: an exchange is two nodes, of which the first one reached starts
        that of the gradient and the second one waits. Autograd runs nodes in the order of their numbers, the youngest
        first. Where only backward communicates (COPY), the waiting node gets the number of the other function's newest
        one, so everything that the other one can compute meanwhile comes before it. Where both directions do, the two
        nodes lie on both sides of the turn of the other function as they are made.
        """
        if how.forward == SUM:  # the sum stands in the memory of its summand, whose gradient is its own
            wait = None if known is not None else self.start(x, how, SUM)
            if known is not None:
                x.detach().copy_(known)
            self.turns.hand_over()
            if wait is not None:
                wait()
            return x
        with_grad = torch.is_grad_enabled() and x.requires_grad
        if how.forward == SAME and not with_grad:
            return self.exchange_at_once(x, how)
        back = _Gradient(self, how, x.shape)
        waited: Tensor = _Wait.apply(x, back) if with_grad else x  # type: ignore[no-untyped-call]
        if how.forward == SAME:
            self._run_late(waited.grad_fn)
            started: Tensor = _Start.apply(waited, None, back)  # type: ignore[no-untyped-call]
            return started
        finish = None if known is not None else self.start(x, how, how.forward)
        if how.communicates:
            self.turns.hand_over()
        made = finish() if finish is not None else known
        assert made is not None
        if known is not None:
            made = made.clone()
        if with_grad:
            made = _Start.apply(waited, [made], back)  # type: ignore[no-untyped-call]
        return made

    def _run_late(self, node: Any) -> None:
        """Has backward run a node behind the newest such one of the other functions."""
        me, number = self.turns.current, place_in_backward(node)
        others = [newest for function, newest in self._newest.items() if function != me]
        if others:
            set_place_in_backward(node, max(others))
        if me is not None:
            self._newest[me] = number


class GroupFusedOps:
    """FusedOps over a group: the operators `torch.ops.fold3d.tp_*matmul*`."""

    def __init__(self, name: str, kept: KeptExchanges) -> None:
        """Args:
        name: by which the operators know the group.
        kept: what was exchanged where code runs again.
        """
        self._name, self._kept = name, kept

    def copy_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """See FusedOps."""
        products: list[Tensor] = _OPS.tp_copy_matmul(x, list(weights), self._name)
        return products

    def all_gather_matmul(
        self, x: Tensor, weights: Sequence[Tensor], dim: int, length: int
    ) -> tuple[Tensor, list[Tensor]]:
        """See FusedOps."""
        products: list[Tensor] = []

        def make(known: Tensor | None) -> Tensor:
            whole: Tensor
            whole, made = _OPS.tp_all_gather_matmul(x, list(weights), dim, length, self._name, known)
            products.extend(made)
            return whole

        return self._kept.recall(make), products

    def matmul_all_reduce(self, x: Tensor, weight: Tensor) -> Tensor:
        """See FusedOps."""
        return self._kept.recall(lambda known: _OPS.tp_matmul_all_reduce(x, weight, self._name, known))

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor, dim: int) -> Tensor:
        """See FusedOps."""
        return self._kept.recall(lambda known: _OPS.tp_matmul_reduce_scatter(x, weight, dim, self._name, known))


class _Gradient:
    """What becomes of one gradient: its move is started by one node, waited for by the next."""

    def __init__(self, group: TensorParallelGroup, how: Exchange, shape: torch.Size) -> None:
        self._group, self._how, self._shape = group, how, shape
        self._finish: Callable[[], Tensor] | None = None

    def start(self, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # create_graph=True
            raise ConfigError(
                'tp_overlap="sub" computes no gradients of gradients (a gradient penalty, create_graph=True), since '
                'what is sent in a backward is not differentiated; set tp_overlap="none"'
            )
        how, sent = self._how, gradient
        if how.backward == SUM:  # a copy: autograd may use what it hands us elsewhere, too
            sent = gradient.clone(memory_format=torch.contiguous_format)
        if how.indices is None:
            self._finish = self._group.start(sent, how, how.backward)
        else:
            some = self._group.start(sent.index_select(how.dim, how.indices).contiguous(), how, how.backward)
            self._finish = lambda: sent.index_copy_(how.dim, how.indices, some())
        return gradient.new_zeros(()).expand(self._shape)  # stands for what is on its way

    def wait(self) -> Tensor:
        finish, self._finish = self._finish, None
        assert finish is not None, "autograd runs the node that starts an exchange first"
        return finish()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, back: _Gradient) -> Tensor:
        ctx.back = back
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back.wait(), None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[Tensor] | None, back: _Gradient) -> Tensor:
        ctx.back = back
        # In a list, so that it is no view of an argument: models add to what they get in place.
        return x.view_as(x) if made is None else made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back.start(gradients[0]), None, None


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
