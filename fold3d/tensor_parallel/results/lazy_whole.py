"""LazyWhole: stands for a tensor of which each rank has a part, and is put together when anything reads it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import detach_variable

from fold3d.tensor_parallel.results.parts import PutTogether

_ALIKE = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "layout", "requires_grad", "grad_fn", "ndim")),
        *(getattr(Tensor, name).__get__ for name in ("is_leaf", "is_cpu", "is_cuda", "is_meta", "is_sparse")),
        *(Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex),
        *(torch.autograd.grad, torch.autograd.backward),  # by what it was made from
    }
)
"""What a part answers as the whole would."""


_THE_SAME = frozenset({Tensor.to, Tensor.contiguous})
"""What often returns what it was given."""

_BEHIND_BLOCKS: ContextVar[bool] = ContextVar("behind_blocks", default=False)


@contextlib.contextmanager
def behind_blocks() -> Iterator[None]:
    """In the body no block computes: the last one's result, which is whole, stands for those of all."""
    token = _BEHIND_BLOCKS.set(True)
    try:
        yield
    finally:
        _BEHIND_BLOCKS.reset(token)


def is_behind_blocks() -> bool:
    """Returns whether this is the body of `behind_blocks`."""
    return _BEHIND_BLOCKS.get()


class LazyWhole(Tensor):
    """What a block returns of its insides, attention weights say, most models drop, and its part of a hidden state the
    next block takes as it is: nobody waits for the whole then. But a model whose own forward computes with it, and
    whoever it returns it to, has the whole. All ranks of the group read alike.

    The memory, and what autograd knows of it, is the part's.
    """

    _put_together: PutTogether
    _made: Tensor | None

    @classmethod
    def of(cls, part: Tensor, put_together: PutTogether) -> LazyWhole:
        """Returns what stands for the whole of `part`."""
        lazy = part.as_subclass(cls)
        lazy._put_together, lazy._made = put_together, None
        return lazy

    def whole(self) -> Tensor:
        """Returns the whole, always the same one; all ranks call."""
        if self._made is None:
            with torch.enable_grad():  # who reads it next may want gradients
                self._made = self._put_together(self.part())
        return self._made

    def part(self) -> Tensor:
        """Returns this rank's part, as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def latest(self) -> Tensor:
        """Returns this rank's part, or the whole where there is one: somebody may have written to it, or have put a
        hook on its gradient."""
        return self.part() if self._made is None else self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALIKE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _THE_SAME and isinstance(args[0], LazyWhole):
            with torch._C.DisableTorchFunctionSubclass():
                if func(*args, **(kwargs or {})) is args[0]:
                    return args[0]
        if func is Tensor.detach and sys._getframe(1).f_code is detach_variable.__code__:  # of a reentrant checkpoint
            return args[0].latest().detach()
        args, kwargs = tree_map_only(LazyWhole, LazyWhole.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def plain_parts(tree: Any) -> Any:
    """Returns `tree` with this rank's parts in the place of what stands for the whole."""
    return tree_map_only(LazyWhole, LazyWhole.part, tree)
