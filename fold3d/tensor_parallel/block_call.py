"""BlockCall: one call of a block that is spread over a tensor-parallel group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fold3d.tensor_parallel.random_draws import ShardDraws
from fold3d.tensor_parallel.region import COPY, RegionOps
from fold3d.torch_private import checkpoint_around, version_of


class BlockCall:
    """What the forwards of a block's modules share while it runs: what has entered a region, and its random numbers.

    Each greenlet has a call of its own, as each thread has: halves of a micro-batch may take turns at every sum.
    """

    def __init__(self, ops: RegionOps, block: str = "") -> None:
        """Args:
        block: the class of the block, for warnings about what it draws; without it there are none.
        """
        self._ops = ops
        self._draws = ShardDraws(ops.rank, block)
        self._open: set[int] = set()
        self._entered: list[tuple[weakref.ref[Tensor], bool, Tensor]] = []
        self._gathered: list[tuple[weakref.ref[Tensor], bool, bool, Tensor]] = []
        self._products: list[tuple[weakref.ref[Tensor], tuple[bool, int], dict[str, Tensor]]] = []
        self._given: tuple[int, int] | None = None
        self._forks = False

    @property
    def given(self) -> tuple[int, int] | None:
        """How many samples the block was given, and how long their whole sequences are; None where nobody said so."""
        return self._given

    def begin(self, samples: int, length: int) -> None:
        """The block was given a part of so many samples whose sequences are so long."""
        self._given = (samples, length)

    def draw(self, *, forks: bool) -> None:
        """Sets whether each rank draws random numbers of its own in regions."""
        self._forks = forks

    @property
    def in_region(self) -> bool:
        """Whether a region has begun and not ended."""
        return bool(self._open)

    def open(self, group: int, device: torch.device) -> None:
        """The region of a group has begun."""
        self._open.add(group)
        if self._forks:
            self._draws.fork(device, group)

    def enter(self, x: Tensor, group: int) -> Tensor:
        """Returns `x` as the region of a group reads it; what several modules take enters once."""
        self.open(group, x.device)
        return self.copy(x)

    def copy(self, x: Tensor) -> Tensor:
        """Returns `x` with a gradient that is summed over the ranks, the same tensor each time."""
        if not x.requires_grad or not torch.is_grad_enabled():
            return x
        for known, with_grad, copied in self._entered:
            if known() is x and with_grad:
                return copied
        copied = self._ops.exchange(x, COPY)
        self._entered.append((weakref.ref(x), True, copied))
        return copied

    def gather(self, x: Tensor, sums: bool, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the whole of which `x` is this rank's part, the same tensor each time.

        Args:
            sums: whether its gradient is summed over the ranks there, so that it enters regions as it is.
        """
        grad = torch.is_grad_enabled()
        for known, summed, with_grad, whole in self._gathered:
            if known() is x and (summed, with_grad) == (sums, grad):
                return whole
        whole = gather(x)
        self._gathered.append((weakref.ref(x), sums, grad, whole))
        if sums:
            self._entered.append((weakref.ref(whole), True, whole))
        return whole

    def add_products(self, x: Tensor, products: Mapping[str, Tensor]) -> None:
        """Linear layers that will be called with `x` are computed already."""
        self._products.append((weakref.ref(x), _state_of(x), dict(products)))

    def product(self, x: Tensor, name: str) -> Tensor | None:
        """Returns what a linear layer makes of `x` without its bias, if it is computed already; only once."""
        for known, state, products in self._products:
            if known() is x and state == _state_of(x):
                return products.pop(name, None)
        return None

    def leave(self, group: int) -> None:
        """The region of a group has ended, up to the sum."""
        self._open.discard(group)
        if not self._open:
            self._draws.join()

    def close(self) -> None:
        """The block has returned or raised."""
        self._open.clear()
        self._draws.join()
        self._entered.clear()
        self._gathered.clear()
        self._products.clear()


def _state_of(x: Tensor) -> tuple[bool, int]:
    """What changes where a tensor is written to, or gradients are no longer wanted."""
    return torch.is_grad_enabled(), version_of(x)


_CURRENT: ContextVar[tuple[object, BlockCall] | None] = ContextVar("fold3d_block_call", default=None)


class BlockCalls:
    """The calls of one block."""

    def __init__(self, ops: RegionOps, block: str = "") -> None:
        self._ops, self._block = ops, block
        self._outside = BlockCall(ops, block)
        self._run: weakref.ref[Any] | None = None  # of a checkpoint's code, to which that one belongs

    def begin(self) -> Any:
        """A call begins; returns what `end` takes."""
        call = BlockCall(self._ops, self._block)
        return call, _CURRENT.set((self, call))

    def end(self, begun: Any) -> None:
        """The call has returned or raised."""
        call, token = begun
        call.close()
        _CURRENT.reset(token)

    def current(self) -> BlockCall:
        """Returns the call that is under way: outside of one, where backward computes a part of the block again, one
        that knows of nothing before."""
        found = _CURRENT.get()
        if found is not None and found[0] is self:
            return found[1]
        around = checkpoint_around()
        if around is not None and (self._run is None or self._run() is not around.run):
            # The run before may have ended within a region: torch stops one that has made all that backward needs.
            self._run, self._outside = weakref.ref(around.run), BlockCall(self._ops, self._block)
        return self._outside

    def left(self, call: BlockCall) -> None:
        """A region has ended: outside of a call of the block nothing else will end it."""
        if call is self._outside:
            call.close()
