"""Parts of tensors that blocks take and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fold3d.sharding.shard import indices_of
from fold3d.sharding.split import Path, TensorSlice
from fold3d.tensor_parallel.region import REDUCE, RegionOps


def paths_of(value: Any, path: Path = ()) -> list[tuple[Path, Tensor]]:
    """Returns the tensors in nested tuples, lists and dicts, with their places."""
    if isinstance(value, Tensor):
        return [(path, value)]
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (tuple, list)):
        items = enumerate(value)
    return [found for key, item in items for found in paths_of(item, (*path, key))]


def replace_leaf(value: Any, path: Path, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns `value`, nested tuples, lists and dicts, with the tensor at `path` changed; without one there, itself."""
    if not path:
        return change(value) if isinstance(value, Tensor) else value
    key, rest = path[0], path[1:]
    if isinstance(value, dict):
        if key not in value:
            return value
        changed = replace_leaf(value[key], rest, change)
        if changed is value[key]:
            return value
        made = value.copy()  # of its own class: results of transformers' models are dicts
        made[key] = changed
        return made
    if isinstance(value, (tuple, list)) and isinstance(key, int) and key < len(value):
        changed = replace_leaf(value[key], rest, change)
        if changed is value[key]:
            return value
        items = [changed if i == key else item for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def replace_argument(args: Any, kwargs: Any, path: Path, change: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """Returns (args, kwargs) of a call with the tensor at `path` changed."""
    if isinstance(path[0], int):
        return replace_leaf(args, path, change), kwargs
    return args, replace_leaf(kwargs, path, change)


def take_part(x: Tensor, sliced: TensorSlice, rank: int) -> Tensor:
    """Returns a rank's part of a whole tensor; a dimension of one, which all units share, stays.

    Raises: ValueError when its dimension is no multiple of what was recorded.
    """
    return x if x.shape[sliced.dim] == 1 and sliced.size > 1 else sliced.take(x, rank)


def gather_part(part: Tensor, one: TensorSlice, rank: int, ops: RegionOps) -> Tensor:
    """Returns the whole tensor of which each rank has its part; all call. What several have each gives a share of."""
    dim, index = one.dim, indices_of(one.parts[rank], part.device)
    spread = part.reshape(*part.shape[:dim], -1, len(index), *part.shape[dim + 1 :])
    holders = torch.zeros(one.size, device=part.device, dtype=part.dtype)
    for runs in one.parts:
        holders[indices_of(runs, part.device)] += 1
    share = spread / holders[index].reshape([-1] + [1] * (spread.dim() - dim - 2))
    shape = [*spread.shape[: dim + 1], one.size, *spread.shape[dim + 2 :]]
    whole = part.new_zeros(shape).index_copy(dim + 1, index, share).flatten(dim, dim + 1)
    return ops.exchange(whole, REDUCE)
