"""KnownValues: the values of tensors without values that follow from a batch alone; Decisions: what a forward read of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fold3d.torch_private import storage_key


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


_aten = torch.ops.aten
_VALUE = "_fold3d_value"
_DRAWN = "_fold3d_drawn"
MOST = 1 << 24
"""Elements of a tensor whose values are followed."""


class KnownValues:
    """Follows values beside the operations on tensors that have none.

    A batch's tensors, constants, and whatever operations make of these alone, have a value: a real tensor in host
    memory, that shares its storage with others where the tensors without values do. Weights, buffers, activations and
    drawn numbers have none. Where code reads a value, that is a decision; see `Decisions`.
    """

    def __init__(self) -> None:
        self._operations: list[tuple[Operation, set[int]]] = []  # and the addresses of storages that it writes to
        self._storages: dict[int, int] = {}  # by numbers of tensors
        self._read: list[tuple[Ref, Any]] = []
        self._counted: list[tuple[Ref, tuple[int, ...]]] = []
        self._inputs: list[Ref] = []
        self._sizes: Sizes = ()
        self._numbers = 0
        self._lost: dict[int, torch.UntypedStorage] = {}  # storages that were overwritten with what is not known

    def give(self, fakes: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Gives the tensors in `fakes`, arguments of a call, the values of those in `values`."""
        real = tensors_of(values)
        self._sizes = sizes_of(real)
        for stand_in, tensor in zip(tensors_of(fakes), real, strict=True):
            ref = self._new_ref()
            self._inputs.append(ref)
            if tensor.device.type != "meta" and not isinstance(tensor, FakeTensor) and tensor.numel() <= MOST:
                with _disable_current_modes():  # a copy made under a mode without values would have none
                    self._set(stand_in, own_copy(tensor), ref)

    def of(self, tensor: Tensor) -> Tensor | None:
        """Returns the value of a tensor, None where it has none that is known."""
        if not isinstance(tensor, FakeTensor):
            return None
        found = vars(tensor).get(_VALUE)
        if found is None or storage_key(found[0]) in self._lost:
            return None
        value: Tensor = found[0]
        return value

    def all_of(self, func: Any, tensors: Sequence[Tensor], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether the result of an operation on these tensors can be known."""
        if func.overloadpacket in _EMPTY or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return False
        if func in _CONSTANT:
            return all(one.device.type == "cpu" and one.numel() <= MOST for one in tensors)
        return all(self.of(one) is not None for one in tensors)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns what the operation makes of the values, all of which are known."""
        own = tree_map_only(Tensor, self._of_argument, (args, dict(kwargs)))
        with torch.no_grad(), _disable_current_modes():
            return func(*own[0], **own[1])

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Any, result: Any) -> None:
        """`values` are those of `result`, which the operation has returned."""
        # First: the result may be an argument.
        own_args, own_kwargs = tree_map_only(Tensor, self._named, (args, dict(kwargs)))
        writes = {storage_key(_value_of(leaf)) for leaf in self._written(func, args, kwargs)}
        refs: list[Ref | None] = []
        for value, tensor in zip(tree_leaves(values), tree_leaves(result), strict=True):
            ref = None
            if isinstance(tensor, FakeTensor):
                ref = self._new_ref()
                self._set(tensor, value, ref)
            refs.append(ref)
        self._operations.append((Operation(func, own_args, own_kwargs, tuple(refs)), writes))

    def fill(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The operation has filled a tensor with a constant, if it is such a one: it reads no value of what it was
        given."""
        number = _FILLED.get(func.overloadpacket)
        if number is None or not isinstance(result, FakeTensor) or result.numel() > _MOST_FILLED:
            return
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return
        if number is _GIVEN:
            number = kwargs.get("fill_value", args[-1])
        with _disable_current_modes():
            value = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype).fill_(number)
        made = (tuple(result.shape), tuple(result.stride())), {"dtype": result.dtype}
        empty, ref = self._new_ref(), self._new_ref()
        self._set(result, value, ref)
        self._operations.append((Operation(_aten.empty_strided.default, *made, (empty,), from_shape=True), set()))
        self._operations.append((Operation(_aten.fill.Scalar, (empty, number), {}, (ref,)), set()))

    def lose(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The operation has written into some of its arguments what is not known."""
        for leaf in self._written(func, args, kwargs):
            value = _value_of(leaf)
            self._lost[storage_key(value)] = value.untyped_storage()

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[FakeTensor]:
        """Yields the arguments that the operation writes into, as far as they ever had a value."""
        if not func._schema.is_mutable:
            return
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for leaf in tree_leaves(given):
                if isinstance(leaf, FakeTensor) and _VALUE in vars(leaf):
                    yield leaf

    def read(self, tensor: Tensor) -> Any:
        """Returns the number in a tensor whose value is known; that is a decision."""
        value = self.of(tensor)
        assert value is not None
        number = number_of(value)
        self._read.append((vars(tensor)[_VALUE][1], number))
        return number

    def count(self, result: Any) -> None:
        """The shape of what an operation returned depends on values: that is a decision."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self._counted.append((vars(leaf)[_VALUE][1], tuple(leaf.shape)))

    def draw(self, func: Any, result: Any) -> None:
        """The operation has drawn numbers, if it is such a one: of its result nothing but the range is known."""
        if func in _DRAWING and isinstance(result, FakeTensor):
            setattr(result, _DRAWN, True)

    def decisions(self) -> Decisions:
        """Returns what was decided, and the operations that led there."""
        needed = {ref.number for ref, _ in (*self._read, *self._counted)}
        storages = {self._storages.get(number) for number in needed}
        kept: list[Operation] = []
        for one, writes in reversed(self._operations) if needed else ():
            if writes & storages or any(ref and ref.number in needed for ref in one.results):
                kept.append(one)
                needed |= one.needs
                storages |= {self._storages.get(number) for number in one.needs}
        kept.reverse()
        return Decisions(tuple(self._inputs), self._sizes, tuple(kept), tuple(self._read), tuple(self._counted))

    def _set(self, tensor: Tensor, value: Tensor, ref: Ref) -> None:
        setattr(tensor, _VALUE, (value, ref))
        self._storages[ref.number] = storage_key(value)

    def _new_ref(self) -> Ref:
        self._numbers += 1
        return Ref(self._numbers)

    def _of_argument(self, tensor: Tensor) -> Tensor:
        value = self.of(tensor) if isinstance(tensor, FakeTensor) else tensor.clone()
        assert value is not None
        return value

    def _named(self, tensor: Tensor) -> Any:
        return vars(tensor)[_VALUE][1] if isinstance(tensor, FakeTensor) else tensor.clone()


def _value_of(tensor: FakeTensor) -> Tensor:
    value: Tensor = vars(tensor)[_VALUE][0]
    return value


def is_drawn(tensor: Tensor) -> bool:
    """Returns whether the tensor holds numbers that were drawn between 0 and 1."""
    return isinstance(tensor, FakeTensor) and _DRAWN in vars(tensor)


def compare_drawn(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Returns what comparing numbers drawn from [0, 1) with a limit gives that none or all of them reach; else None."""
    if func not in _COMPARING or not is_drawn(args[0]):
        return None
    less, inclusive = _COMPARING[func]
    limit = args[1]
    if limit >= 1:
        return less
    return not less if limit < 0 or (limit == 0 and inclusive is not less) else None


_EMPTY = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.empty_permuted}
)
_GIVEN = object()
_FILLED: dict[Any, Any] = {
    **dict.fromkeys((_aten.zeros_like, _aten.new_zeros), 0),
    **dict.fromkeys((_aten.ones_like, _aten.new_ones), 1),
    **dict.fromkeys((_aten.full_like, _aten.new_full), _GIVEN),
}
"""With what operations fill a tensor of which their arguments say the shape."""
_MOST_FILLED = 1 << 20
"""Elements of such a tensor whose values are followed: many are made for each layer, and few of them decide."""
_CONSTANT = frozenset({_aten.lift_fresh.default, _aten.lift.default})
"""What makes a tensor of a constant in the code."""
_DRAWING = frozenset({_aten.rand.default, _aten.rand.generator, _aten.rand_like.default})
_COMPARING = {
    _aten.lt.Scalar: (True, False), _aten.le.Scalar: (True, True),
    _aten.gt.Scalar: (False, False), _aten.ge.Scalar: (False, True),
}  # fmt: skip
"""Whether what is less than the limit passes, and whether the limit itself does."""
