"""beneath(): operations on parts where no function of torch's Python was called: by autograd, by C++, in Functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fold3d.tensor_parallel.vocabulary.column_parallel import ColumnParallel

_aten = torch.ops.aten
_SAME_PLACES = frozenset(
    {_aten.detach, _aten.alias, _aten.clone, _aten._to_copy, _aten.zeros_like, _aten.ones_like, _aten.empty_like}
)


def beneath(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator, below autograd, with ColumnParallels among its arguments.

    What works on each element alone does so on parts; tensors of the whole's shape are cut to them. Everything else
    runs on whole tensors: the ranks gather them, in the same order, because they run the same program.
    """
    ours = [one for one in tree_leaves((args, kwargs)) if isinstance(one, ColumnParallel)]
    first = ours[0]
    if func.overloadpacket is _aten.copy_:
        return _copy(args[0], args[1])
    alone = torch.Tag.pointwise in func.tags or func.overloadpacket in _SAME_PLACES
    moves = kwargs.get("device", first.memory().device) != first.memory().device
    if alone and not moves and all(one.matches(first) for one in ours):
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if all(isinstance(one, ColumnParallel) or _fits(one, first) for one in tensors):
            return _on_parts(func, args, kwargs, first)
    return _on_whole(func, args, kwargs)


def _fits(tensor: Tensor, like: ColumnParallel) -> bool:
    return tensor.ndim < like.behind() or tensor.shape[-like.behind()] in (1, like.columns.size)


def _on_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: ColumnParallel) -> Any:
    behind, columns = first.behind(), first.columns

    def local(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ColumnParallel):
            return tensor.memory()
        if tensor.ndim < behind or tensor.shape[-behind] == 1:
            return tensor
        return tensor.narrow(tensor.ndim - behind, columns.first, columns.length)

    inner, inner_kwargs = tree_map_only(Tensor, local, (args, kwargs))
    result = func(*inner, **inner_kwargs)
    if func._schema.is_mutable:
        return args[0]
    return tree_map_only(Tensor, lambda part: type(first)(part, columns, part.ndim - behind), result)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = args[0] if func._schema.is_mutable and args and isinstance(args[0], ColumnParallel) else None
    inner, inner_kwargs = tree_map_only(ColumnParallel, _gather, (args, kwargs))
    result = func(*inner, **inner_kwargs)
    if written is None:
        return result
    _copy(written, inner[0])
    return written


def _gather(one: ColumnParallel) -> Tensor:
    return one.columns.gather(one.memory(), one.vocabulary_dim)


def _copy(target: Tensor, source: Tensor) -> Tensor:
    if not isinstance(target, ColumnParallel):
        return target.copy_(_gather(source) if isinstance(source, ColumnParallel) else source)
    columns = target.columns
    if isinstance(source, ColumnParallel):
        same = source.matches(target)
        part = source.memory() if same else None
        source = source if same else _gather(source)
    else:
        part = source if source.ndim < target.behind() or source.shape[-target.behind()] == 1 else None
    if part is None:
        part = source.narrow(source.ndim - target.behind(), columns.first, columns.length)
    target.memory().copy_(part)
    return target
