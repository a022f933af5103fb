"""StackedNumbers: torch.tensor() of numbers that are tensors, where these have no values."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class StackedNumbers(TorchFunctionMode):
    """`torch.tensor([0, one.max(), other.max()])` looks into its elements' memory; on tensors without values it stacks
    them, which gives the same."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Returns what the function returns."""
        kwargs = kwargs or {}
        if func is torch.tensor and args and _is_list_of_numbers(args[0]):
            made = _stack([one.detach() if isinstance(one, Tensor) else torch.tensor(one) for one in args[0]])
            wanted = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
            made = made.to(**wanted) if wanted else made
            return made.requires_grad_() if kwargs.get("requires_grad") else made
        return func(*args, **kwargs)


def _stack(numbers: list[Tensor]) -> Tensor:
    dtype = functools.reduce(torch.promote_types, (one.dtype for one in numbers))
    return torch.stack([one.to(dtype) for one in numbers])


def _is_list_of_numbers(data: Any) -> bool:
    """Returns whether some of these numbers are tensors."""
    if not isinstance(data, (list, tuple)):
        return False
    numbers = all(isinstance(one, (bool, int, float)) or (isinstance(one, Tensor) and one.ndim == 0) for one in data)
    return numbers and any(isinstance(one, Tensor) for one in data)
