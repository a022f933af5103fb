"""WholeSizes: a block's code that asks for views by sizes of the whole, on a rank that has its share of the units."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WholeSizes(TorchFunctionMode):
    """Within, `q.view(batch, tokens, heads, width // heads)`, with `width` from the size of the whole hidden state, is
    that of a rank's heads.

    Where a view is to have `ranks` times as many elements as there are, the dimension that the ranks share is divided:
    the one that makes the sizes a regrouping of the tensor's, in the smallest groups. Of several into which the last
    dimension, of channels, is cut, it is the first that can be: of heads. Where that is not clear, the call fails, as
    it would without this.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KINDS and not kwargs and args:
            tensor, first, rest = args[0], _FIRST[func], args[1:]
            sizes = rest[first:] if len(rest) > first and isinstance(rest[first], int) else rest[first]
            if isinstance(sizes, (tuple, list)) and all(type(size) is int for size in sizes):
                args = (tensor, *rest[:first], self._of_rank(func, tensor, rest[:first], sizes))
        return func(*args, **kwargs)

    def _of_rank(self, func: Any, tensor: Tensor, before: tuple[Any, ...], sizes: Sequence[int]) -> Sequence[int]:
        if func is Tensor.expand:
            own = (1,) * (len(sizes) - tensor.dim()) + tuple(tensor.shape)
            return [
                one if one != 1 and size == one * self._ranks else size for one, size in zip(own, sizes, strict=True)
            ]
        if func in (Tensor.unflatten, torch.unflatten):
            return self._divided((tensor.shape[before[0]],), sizes)
        return self._divided(tuple(tensor.shape), sizes)

    def _divided(self, shape: Sequence[int], sizes: Sequence[int]) -> Sequence[int]:
        """Returns the sizes, one of them a rank's, for a tensor of `shape`; as they are where that is not clear."""
        if not shape or prod(sizes) != prod(shape) * self._ranks or min(sizes, default=0) < 1:
            return sizes
        first = _alike(shape[:-1], sizes)  # dimensions that are in both; one is left
        last = _alike(shape[:first:-1], sizes[first:][::-1])
        own, asked = range(first, len(shape) - last), sizes[first : len(sizes) - last]
        found: list[tuple[int, _Group, list[int]]] = []
        for number, size in enumerate(asked):
            if not size % self._ranks:
                mine = [*asked[:number], size // self._ranks, *asked[number + 1 :]]
                groups = _groups([shape[dim] for dim in own], mine)
                found.append((len(groups), next(one for one in groups if number in one[1]), mine))
        finest = [(group, mine) for count, group, mine in found if count == max(count for count, *_ in found)]
        if not finest or any(group != finest[0][0] for group, _ in finest):
            return sizes
        (dims, into), mine = finest[0]
        is_cut = len([number for number in into if asked[number] > 1]) > 1
        is_last = not last and dims == (len(own) - 1,)
        return sizes if is_cut and not is_last else [*sizes[:first], *mine, *sizes[len(sizes) - last :]]


def _alike(shape: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns in how many dimensions from the first on both agree."""
    pairs = enumerate(zip(shape, sizes, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(shape), len(sizes)))


_Group = tuple[tuple[int, ...], tuple[int, ...]]


def _groups(shape: Sequence[int], sizes: Sequence[int]) -> list[_Group]:
    """Returns the numbers of consecutive dimensions of `shape` and of `sizes` that have as many elements: the smallest
    such groups that make up both."""
    found: list[_Group] = []
    first = [0, 0]
    for end in range(1, len(shape) + 1):
        ends = [stop for stop in range(first[1], len(sizes) + 1) if prod(sizes[:stop]) == prod(shape[:end])]
        if ends:
            stop = len(sizes) if end == len(shape) else ends[0]
            found.append((tuple(range(first[0], end)), tuple(range(first[1], stop))))
            first = [end, stop]
    return found


_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
_FIRST = {**dict.fromkeys((*_VIEWS, Tensor.expand), 0), Tensor.unflatten: 1, torch.unflatten: 1}
"""Functions that are given sizes, and behind how many arguments besides the tensor."""
_KINDS = frozenset(_FIRST)
