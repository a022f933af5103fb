"""put_together(): a model returns whole what its ranks have in parts: hidden states, attention weights, routers'
logits.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from fold3d.torch_private import is_called_by_detach_variable
from fold3d.trace.arguments import ancestors
from fold3d.trace.coat import Coat, Wrap

PutTogether = Callable[[Tensor], Tensor]
"""Returns the whole, the same on each rank; all ranks of the group call it."""


class ReturnedParts:
    """Those that are still alive. What backward computes again is none: nobody returns it from the model."""

    def __init__(self) -> None:
        self._noted: list[tuple[weakref.ref[Tensor], PutTogether]] = []

    def note(self, part: Tensor, whole: PutTogether) -> None:
        """`part` has been returned."""
        self._noted = [(ref, how) for ref, how in self._noted if ref() is not None]
        self._noted.append((weakref.ref(part), whole))

    def __iter__(self) -> Iterator[tuple[Tensor, PutTogether]]:
        for ref, whole in self._noted:
            part = ref()
            if part is not None:
                yield part, whole


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
        if func is Tensor.detach and is_called_by_detach_variable(2):  # of a reentrant checkpoint
            return args[0].latest().detach()
        args, kwargs = tree_map_only(LazyWhole, LazyWhole.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def plain_parts(tree: Any) -> Any:
    """Returns `tree` with this rank's parts in the place of what stands for the whole."""
    return tree_map_only(LazyWhole, LazyWhole.part, tree)


def put_together(coat: Coat, model: nn.Module, blocks: Iterable[str], parts: Sequence[ReturnedParts]) -> None:
    """Has the model, and what holds its blocks, return the whole of these parts.

    Of hidden states and of what hooks collect only what is returned as it is: what code in between computes of a part
    stays one.
    """

    def whole(module: nn.Module, args: Any, output: Any) -> Any:
        put = _PuttingTogether({id(part): (part, how) for noted in parts for part, how in noted})
        changed = put.of(output)
        return changed if put.made else None

    for name in ancestors(blocks):
        coat.put(Wrap.WHOLE, model.get_submodule(name), whole)


class _PuttingTogether:
    """Of what one call of a module returned."""

    def __init__(self, ways: dict[int, tuple[Tensor, PutTogether]]) -> None:
        self.made: dict[int, Tensor] = {}
        """Whole tensors, by the identity of the part."""
        self._ways = ways
        self._seen: set[int] = set()

    def of(self, output: Any) -> Any:
        """Returns the output with whole tensors. Objects of the model's own classes are changed in place."""
        return tree_map(self._change, output)

    def _change(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in self.made:
                if isinstance(leaf, LazyWhole):
                    self.made[id(leaf)] = leaf.whole()
                elif id(leaf) in self._ways:
                    self.made[id(leaf)] = self._ways[id(leaf)][1](leaf)
            return self.made.get(id(leaf), leaf)
        if _is_users(leaf) and id(leaf) not in self._seen:
            self._seen.add(id(leaf))
            for name in [field.name for field in fields(leaf)] if is_dataclass(leaf) else list(vars(leaf)):
                before = len(self.made)
                changed = self.of(getattr(leaf, name, None))
                if len(self.made) > before:
                    object.__setattr__(leaf, name, changed)
        return leaf


def _is_users(leaf: Any) -> bool:
    """Whether it is an object that somebody has made to hold results: none of a library's, such as a cache, and no
    module or function."""
    kind = type(leaf)
    if issubclass(kind, (nn.Module, type)) or callable(leaf) or kind.__module__.startswith(("torch.", "transformers.")):
        return False
    return is_dataclass(leaf) or hasattr(leaf, "__dict__")
