"""Decisions: the numbers of a batch by which a forward decided what to do, and how to tell them of another batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor of known values: a number of its own."""

    number: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on known values, with Ref in place of those tensors that are no constants."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Ref | None, ...]
    """Of the leaves of what it returns."""
    from_shape: bool = False
    """Whether it makes a constant of a shape that was that of a tensor whose values are not known."""

    @property
    def needs(self) -> set[int]:
        """Numbers of the tensors that it reads."""
        return {leaf.number for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)}


Sizes = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Decisions:
    """What a recorded forward read of values that follow from its batch alone, by `.item()`, `bool()`, `.tolist()`.

    A recording holds for batches of the same sizes of which the same operations make the same values.
    """

    inputs: tuple[Ref, ...]
    """Of the tensors among the arguments of the call, as `tensors_of` lists them."""
    sizes: Sizes
    operations: tuple[Operation, ...]
    """Those that lead to what was read, in order."""
    read: tuple[tuple[Ref, Any], ...]
    """What was read, and what it was."""
    counted: tuple[tuple[Ref, tuple[int, ...]], ...]
    """Tensors whose shape depends on values, such as those of `nonzero`, and the shapes."""

    def hold_for(self, arguments: Mapping[str, Any], *, shapes: bool = False) -> bool:
        """Returns whether a forward decides alike on other arguments, of the same form.

        Shapes that depend on values are sizes like those of the batch, of which a forward does the same with any; but
        what was empty must be empty, and nothing else.

        Args:
            shapes: they must be the same.
        """
        if not self.read and not self.counted:
            return True
        tensors = tensors_of(arguments)
        if sizes_of(tensors) != self.sizes:
            return False
        with torch.no_grad(), torch.autocast("cpu", enabled=False), _disable_current_modes():
            try:
                return self._repeat(tensors, shapes)
            except (RuntimeError, IndexError, ValueError):  # shapes that were made do not fit what was recorded
                return False

    def _repeat(self, tensors: Sequence[Tensor], shapes: bool) -> bool:
        further = {number for one in self.operations for number in one.needs}
        fixed = shapes or any(one.from_shape for one in self.operations)
        needed = further.union(ref.number for ref, _ in (*self.read, *self.counted))
        values = {
            ref.number: own_copy(tensor)
            for ref, tensor in zip(self.inputs, tensors, strict=True)
            if ref.number in needed
        }
        for one in self.operations:
            args, kwargs = tree_map_only(Ref, lambda ref: values[ref.number], (one.args, one.kwargs))
            made = tree_leaves(one.function(*args, **kwargs))
            values.update({ref.number: leaf for ref, leaf in zip(one.results, made, strict=True) if ref is not None})
        for ref, shape in self.counted:
            now = tuple(values[ref.number].shape)
            exactly = fixed or ref.number in further  # numbers among the operations may be made of these sizes
            if now != shape if exactly else (0 in now) != (0 in shape):
                return False
        return all(same(number_of(values[ref.number]), value) for ref, value in self.read)


NONE = Decisions((), (), (), (), ())


def tensors_of(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors among the arguments of a call, but not the count by which losses are divided: no micro-batch
    knows it."""
    named = [arguments[name] for name in sorted(arguments) if name != "num_items_in_batch"]
    return [leaf for leaf in tree_leaves(named) if isinstance(leaf, Tensor)]


def sizes_of(tensors: Sequence[Tensor]) -> Sizes:
    """Returns what must be equal for the operations on one batch to be those on another."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def own_copy(tensor: Tensor) -> Tensor:
    """Returns its values in host memory, in storage of its own: a model's code may write into its batch."""
    return tensor.detach().to("cpu", copy=True)


def number_of(tensor: Tensor) -> Any:
    """Returns the value of a tensor with one element."""
    return tensor.item()


def same(one: Any, other: Any) -> bool:
    """Returns whether two numbers lead to the same decisions: NaN is like NaN."""
    return bool(one == other) or (one != one and other != other)
