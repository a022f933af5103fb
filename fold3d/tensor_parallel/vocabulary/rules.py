"""Rules: how functions of torch are computed on tensors held in parts: those of each element on its own, those that
only arrange elements, sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from fold3d.tensor_parallel.vocabulary.column_parallel import ColumnParallel


class NeedsWhole(Exception):
    """The function cannot be computed on parts: gather the tensors and call it on the whole."""


@dataclass(frozen=True, slots=True)
class Call:
    """What __torch_function__ is told."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The function's name, for logs; of a property its own."""
        name: str = getattr(self.function, "__name__", str(self.function))
        if name in ("__get__", "__set__"):
            name = getattr(getattr(self.function, "__self__", None), "__name__", name)
        return name

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors among the arguments."""
        return (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor))

    def subject(self) -> ColumnParallel:
        """Returns the first argument. Raises: NeedsWhole when it is none of ours, or others among the arguments are."""
        found: list[ColumnParallel] = [one for one in self.tensors() if isinstance(one, ColumnParallel)]
        if len(found) != 1 or not self.args or self.args[0] is not found[0] or "out" in self.kwargs:
            raise NeedsWhole
        subject: ColumnParallel = found[0]
        return subject

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Returns an argument that may be given by position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


Rule = Callable[[Call], Any]
"""Returns what the function returns. Raises: NeedsWhole."""


def words(text: str) -> list[str]:
    """Returns the words of a list that is written as one text."""
    return text.split()


def functions(names: str) -> Iterator[Callable[..., Any]]:
    """Yields torch's functions and methods of these names, which stand in one text."""
    for name in words(names):
        for home in (torch, Tensor, functional):
            found = getattr(home, name, None)
            if callable(found):
                yield found


def over_vocabulary(call: Call) -> tuple[ColumnParallel, int]:
    """Returns the tensor and its vocabulary's dimension, of a function along this dimension.

    Raises: NeedsWhole when it is along another one.
    """
    logits = call.subject()
    dim = call.argument(1, "dim", call.kwargs.get("axis"))
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    if not isinstance(dim, int) or dim not in (
        logits.vocabulary_dim,
        logits.vocabulary_dim - len(logits.shape_of_whole()),
    ):
        raise NeedsWhole
    return logits, logits.vocabulary_dim


_UNARY = (
    "float double half bfloat16 clone contiguous positive __pos__ neg negative __neg__ abs __abs__ exp expm1 "
    "log log1p log2 sqrt rsqrt square reciprocal tanh sigmoid logsigmoid relu gelu silu softplus sin cos erf "
    "clamp clip clamp_min clamp_max round floor ceil sign isnan isinf isfinite isneginf isposinf nan_to_num "
    "logical_not __invert__ bool int long zeros_like ones_like empty_like full_like"
)
_NARY = (
    "add sub subtract rsub mul multiply div divide true_divide pow maximum minimum fmax fmin where "
    "masked_fill lerp addcmul addcdiv eq ne lt le gt ge logical_and logical_or logaddexp __add__ __radd__ "
    "__sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__ __eq__ "
    "__ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__"
)


def elementwise(call: Call) -> Any:
    """Computes the function on this rank's part of each argument.

    Other tensors are shared, or cut where they have a column for each entry of the vocabulary.
    """
    ours = [tensor for tensor in call.tensors() if isinstance(tensor, ColumnParallel)]
    first, behind = ours[0], ours[0].behind()
    if call.kwargs.keys() & {"out", "inplace"} or not all(one.matches(first) for one in ours):
        raise NeedsWhole
    if call.kwargs.get("device", first.memory().device) != first.memory().device:
        raise NeedsWhole
    size, columns = first.columns.size, first.columns
    most = 0
    parts: dict[int, ColumnParallel] = {}

    def local(tensor: Tensor) -> Tensor:
        nonlocal most
        if isinstance(tensor, ColumnParallel):
            most = max(most, tensor.memory().ndim)
            part = tensor.part()
            parts[id(part)] = tensor
            return part
        most = max(most, tensor.ndim)
        if tensor.ndim < behind or tensor.shape[-behind] == 1:
            return columns.share(tensor)
        if tensor.shape[-behind] != size:
            raise NeedsWhole  # and torch's own error there
        return columns.scatter(tensor, tensor.ndim - behind)

    args, kwargs = tree_map_only(Tensor, local, (call.args, call.kwargs))
    result = call.function(*args, **kwargs)
    if not isinstance(result, Tensor):  # a comparison with None, say
        return result
    if id(result) in parts:  # nothing to do: such as float() of what is float32
        return parts[id(result)]
    return first.like(result, most - behind)


def cast(call: Call) -> Any:
    """`to`, `type`, `type_as`: another dtype. What goes to another device goes there whole."""
    logits = call.args[0]
    if not isinstance(logits, ColumnParallel):  # like it, is something else
        if call.name == "type_as":
            return call.args[0].to(dtype=call.args[1].memory().dtype, device=call.args[1].memory().device)
        found = [one.memory() if isinstance(one, ColumnParallel) else one for one in call.args]
        return call.function(*found, **call.kwargs)
    others = [one.memory() if isinstance(one, ColumnParallel) else one for one in call.args[1:]]
    kwargs = {k: one.memory() if isinstance(one, ColumnParallel) else one for k, one in call.kwargs.items()}
    target = kwargs.get("device", others[0] if others else None)
    target = target.device if isinstance(target, Tensor) else target
    memory = logits.memory()
    if isinstance(target, (str, torch.device, int)) and torch.empty(0, device=target).device != memory.device:
        raise NeedsWhole
    part = logits.part()
    result = call.function(part, *others, **kwargs)
    if not isinstance(result, Tensor):  # the name of its type
        return result
    if result is part:
        return logits
    return logits.like(result, logits.vocabulary_dim)


def detach(call: Call) -> ColumnParallel:
    """`detach` and `data`: the same memory without a gradient."""
    logits = call.subject()
    return type(logits)(logits.memory().detach(), logits.columns, logits.vocabulary_dim, True)


_ARRANGING = (
    "transpose swapaxes swapdims permute movedim moveaxis t adjoint squeeze unsqueeze flatten narrow select "
    "split split_with_sizes tensor_split chunk unbind expand"
)
_PROPERTIES = ("T", "mT")
_RESHAPING = "view reshape view_as reshape_as unflatten"


def arrange(call: Call) -> Any:
    """Does with the part what is done with the whole, if the vocabulary remains one dimension of its full length.

    Found out on two tensors without memory, with V and V - 1 entries: where a result has as many, it has all of them,
    in their order (none of these functions changes an order within a dimension).
    """
    logits = call.subject()
    shape, along, size = logits.shape_of_whole(), logits.vocabulary_dim, logits.columns.size
    found = []
    for entries in (size, size - 1):
        probe = torch.empty([*shape[:along], entries, *shape[along + 1 :]], device="meta")
        found.append(tree_flatten(_run(call, probe))[0])
    alongs = (
        [_place(whole, fewer, size) for whole, fewer in zip(*found, strict=True)]
        if len(found[0]) == len(found[1])
        else []
    )
    results, structure = tree_flatten(_run(call, logits.part()))
    if len(results) != len(alongs):
        raise NeedsWhole
    return tree_unflatten(
        [logits.like(part, at, is_view=True) for part, at in zip(results, alongs, strict=True)], structure
    )


def _run(call: Call, instead: Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return call.function(instead, *call.args[1:], **call.kwargs)
        except (RuntimeError, IndexError, ValueError):
            raise NeedsWhole from None  # the error is raised again where the function is called on the whole


def _place(whole: Tensor, fewer: Tensor, size: int) -> int:
    """Returns the dimension in which two shapes differ by one entry. Raises: NeedsWhole when there is none."""
    if whole.ndim == fewer.ndim:
        differ = [dim for dim in range(whole.ndim) if whole.shape[dim] != fewer.shape[dim]]
        if len(differ) == 1 and (whole.shape[differ[0]], fewer.shape[differ[0]]) == (size, size - 1):
            return differ[0]
    raise NeedsWhole


def reshape(call: Call) -> ColumnParallel:
    """`view` and the like: the vocabulary stays a dimension of its own when what lies before it stays before it."""
    logits = call.subject() if call.name not in ("view_as", "reshape_as") else call.args[0]
    if not isinstance(logits, ColumnParallel) or any(isinstance(one, torch.dtype) for one in call.args):
        raise NeedsWhole
    shape, size = logits.shape_of_whole(), logits.columns.size
    args = [torch.empty(one.shape, device="meta") if isinstance(one, Tensor) else one for one in call.args[1:]]
    target = list(_run(Call(call.function, (None, *args), call.kwargs), torch.empty(shape, device="meta")).shape)
    before = math.prod(shape[: logits.vocabulary_dim])
    for along, length in enumerate(target):
        if length == size and math.prod(target[:along]) == before:
            part = logits.part().reshape([*target[:along], logits.columns.length, *target[along + 1 :]])
            return logits.like(part, along, is_view=True)
    raise NeedsWhole


def index(call: Call) -> ColumnParallel:
    """`logits[...]`: any index of other dimensions, with `:` (or what it means) for the vocabulary."""
    logits = call.args[0]
    if not isinstance(logits, ColumnParallel):
        raise NeedsWhole  # it is the index
    asked = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    items = list(_spelled_out(asked, len(logits.shape_of_whole())))
    dim = 0
    for position, item in enumerate(items):
        if dim == logits.vocabulary_dim and isinstance(item, slice):
            if item.indices(logits.columns.size) != (0, logits.columns.size, 1):
                raise NeedsWhole
            items[position] = slice(None)
            return _indexed(logits, tuple(items))
        dim += _consumed(item)
        if dim > logits.vocabulary_dim:
            break
    raise NeedsWhole


def _indexed(logits: ColumnParallel, items: tuple[Any, ...]) -> ColumnParallel:
    with torch._C.DisableTorchFunctionSubclass():
        shape, along = logits.shape_of_whole(), logits.vocabulary_dim
        kept = [
            torch.zeros((), dtype=torch.uint8).expand([*shape[:along], entries, *shape[along + 1 :]])[
                tuple(item.cpu() if isinstance(item, Tensor) else item for item in items)
            ]
            for entries in (2, 3)
        ]
        part = logits.part()[items]
    return logits.like(part, _place(kept[1], kept[0], 3), is_view=True)


def _spelled_out(items: tuple[Any, ...], ndim: int) -> Iterator[Any]:
    """Yields the items of an index with `...`, and what is left out at the end, as slices."""
    missing = ndim - sum(_consumed(item) for item in items)
    seen = False
    for item in items:
        if item is Ellipsis:
            yield from [slice(None)] * (0 if seen else missing)
            seen = True
        else:
            yield item
    if not seen:
        yield from [slice(None)] * missing


def _consumed(item: Any) -> int:
    """Returns how many dimensions an item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.ndim
    if isinstance(item, (list, tuple)):
        return max(1, torch.as_tensor(item).ndim) if _is_mask(item) else 1
    return 1


def _is_mask(item: Any) -> bool:
    return isinstance(item, bool) or (isinstance(item, (list, tuple)) and any(_is_mask(one) for one in item))


def iterate(call: Call) -> Any:
    """`for row in logits`."""
    return iter(call.subject().unbind(0))


def join(call: Call) -> Any:
    """`cat` and `stack` of tensors that are all in parts, along another dimension."""
    parts = call.args[0] if call.args else call.kwargs.get("tensors", ())
    dim = call.argument(1, "dim", call.kwargs.get("axis", 0))
    if not parts or "out" in call.kwargs or not isinstance(dim, int):
        raise NeedsWhole
    first = parts[0]
    for one in parts:
        if not isinstance(one, ColumnParallel) or not one.matches(first) or one.vocabulary_dim != first.vocabulary_dim:
            raise NeedsWhole
    stacks = call.name == "stack"
    dim %= first.memory().ndim + stacks
    if not stacks and dim == first.vocabulary_dim:
        raise NeedsWhole
    joined = call.function([one.part() for one in parts], dim)
    return first.like(joined, first.vocabulary_dim + (stacks and dim <= first.vocabulary_dim))


def total(call: Call) -> Tensor:
    """`sum`: over the vocabulary, alone or among others, the ranks' sums are added; over other dimensions it stays."""
    tensor, dims, keeps, dtype = _arguments(call)
    return _sum(tensor, dims, keeps, dtype)


def mean(call: Call) -> Tensor:
    """`mean`: the sum by the number."""
    tensor, dims, keeps, dtype = _arguments(call)
    shape = tensor.shape_of_whole()
    dtype = dtype or tensor.memory().dtype
    if not dtype.is_floating_point:
        raise NeedsWhole  # and torch's own error there
    return _sum(tensor, dims, keeps, dtype) / math.prod(shape[dim] for dim in dims)


def _arguments(call: Call) -> tuple[ColumnParallel, list[int], bool, torch.dtype | None]:
    """Returns the tensor, the dimensions, all from 0, whether they are kept, and the result's type."""
    tensor = call.subject()
    ndim = len(tensor.shape_of_whole())
    dtype = next((one for one in call.args if isinstance(one, torch.dtype)), call.kwargs.get("dtype"))
    plain = [one for one in call.args[1:] if not isinstance(one, torch.dtype)]
    asked: Any = call.kwargs.get("dim", call.kwargs.get("axis"))
    keeps = bool(call.kwargs.get("keepdim", call.kwargs.get("keepdims", False)))
    if plain and isinstance(plain[-1], bool):
        keeps = plain.pop()
    if plain:
        asked = plain[0] if len(plain) == 1 else plain
    dims = [asked] if isinstance(asked, int) else list(asked) if asked is not None else []
    if not all(isinstance(dim, int) and -ndim <= dim < ndim for dim in dims):
        raise NeedsWhole
    return tensor, sorted({dim % ndim for dim in dims}) or list(range(ndim)), keeps, dtype


def _sum(tensor: ColumnParallel, dims: list[int], keeps: bool, dtype: torch.dtype | None) -> Tensor:
    part = tensor.part().sum(dims, keepdim=keeps, dtype=dtype)
    if tensor.vocabulary_dim not in dims:
        gone = 0 if keeps else sum(dim < tensor.vocabulary_dim for dim in dims)
        return tensor.like(part, tensor.vocabulary_dim - gone)
    return tensor.columns.add_up(part)


def rules() -> dict[Any, Rule]:
    """Returns the rules of this file by function."""
    found: dict[Any, Rule] = dict.fromkeys(functions(f"{_UNARY} {_NARY}"), elementwise)
    found.update(dict.fromkeys(functions("to type type_as"), cast))
    found.update({Tensor.detach: detach, torch.detach: detach, Tensor.data.__get__: detach})  # type: ignore[attr-defined]
    found.update(dict.fromkeys(functions(_ARRANGING), arrange))
    found.update((getattr(Tensor, name).__get__, arrange) for name in _PROPERTIES)
    found.update(dict.fromkeys(functions(_RESHAPING), reshape))
    found.update(dict.fromkeys(functions("cat concat concatenate stack"), join))
    found.update({Tensor.__getitem__: index, Tensor.__iter__: iterate})
    return {**found, **dict.fromkeys(functions("sum"), total), **dict.fromkeys(functions("mean"), mean)}
