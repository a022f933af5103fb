"""WithoutMemory: what code does with the memory of tensors, where these have none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WithoutMemory(TorchFunctionMode):
    """Does the like of operations that look into memory, or leave it as it is, with tensors that have none.

    `torch.tensor([0, one.max(), other.max()])`, and `x[rows, columns]` with lists of such numbers, look into the memory
    of the elements: these are stacked, which gives the same. What `torch.empty` returns is filled with zeros: nobody
    reads it before it is written to, and then it is known whether all that was written is.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Returns what the function returns."""
        kwargs = kwargs or {}
        if func is torch.tensor and args and _is_list_of_numbers(args[0]):
            made = _stack(args[0])
            wanted = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
            made = made.to(**wanted) if wanted else made
            return made.requires_grad_() if kwargs.get("requires_grad") else made
        if func in _INDEXING and isinstance(args[1], tuple):
            args = (args[0], tuple(_stack(one) if _is_list_of_numbers(one) else one for one in args[1]), *args[2:])
        filled = _FILLED.get(func)
        if filled is not None and "out" not in kwargs and kwargs.get("memory_format") in _USUAL:
            return filled(*args, **{name: value for name, value in kwargs.items() if name != "memory_format"})
        return func(*args, **kwargs)


_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_FILLED: Mapping[Any, Callable[..., Any]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    Tensor.new_empty: Tensor.new_zeros,
}
_USUAL = (None, torch.preserve_format, torch.contiguous_format)


def _stack(numbers: Sequence[Any]) -> Tensor:
    tensors = [one.detach() if isinstance(one, Tensor) else torch.tensor(one) for one in numbers]
    dtype = functools.reduce(torch.promote_types, (one.dtype for one in tensors))
    return torch.stack([one.to(dtype) for one in tensors])


def _is_list_of_numbers(data: Any) -> bool:
    """Returns whether some of these numbers are tensors."""
    if not isinstance(data, (list, tuple)):
        return False
    numbers = all(isinstance(one, (bool, int, float)) or (isinstance(one, Tensor) and one.ndim == 0) for one in data)
    return numbers and any(isinstance(one, Tensor) for one in data)
