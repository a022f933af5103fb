"""Functions that only arrange elements, along other dimensions than the vocabulary, computed on parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fold3d.tensor_parallel.vocabulary.call import Call, NeedsWhole, Rule, functions
from fold3d.tensor_parallel.vocabulary.column_parallel import ColumnParallel

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


def rules() -> dict[Any, Rule]:
    """Returns the rules of this file by function."""
    found: dict[Any, Rule] = dict.fromkeys(functions(_ARRANGING), arrange)
    found.update((getattr(Tensor, name).__get__, arrange) for name in _PROPERTIES)
    found.update(dict.fromkeys(functions(_RESHAPING), reshape))
    found.update(dict.fromkeys(functions("cat concat concatenate stack"), join))
    found.update({Tensor.__getitem__: index, Tensor.__iter__: iterate})
    return found
