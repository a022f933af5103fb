"""StackedNumbers: torch.tensor() of numbers that are tensors, where these have no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class StackedNumbers(TorchFunctionMode):
    """`torch.tensor([one.max(), other.max()])` looks into its elements' memory; on tensors without values it stacks
    them, which gives the same."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Returns what the function returns."""
        kwargs = kwargs or {}
        if func is torch.tensor and args and _is_list_of_numbers(args[0]):
            made = torch.stack([one.detach() for one in args[0]])
            wanted = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
            made = made.to(**wanted) if wanted else made
            return made.requires_grad_() if kwargs.get("requires_grad") else made
        return func(*args, **kwargs)


def _is_list_of_numbers(data: Any) -> bool:
    is_list = isinstance(data, (list, tuple)) and bool(data)
    return is_list and all(isinstance(one, Tensor) and one.ndim == 0 for one in data)
