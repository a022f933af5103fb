"""DoubleMode: code that computes in single precision, whatever it is given, computes in double precision."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class DoubleMode(TorchFunctionMode):
    """Norms and softmaxes of many models ask for float32; comparisons to 1e-10 want more."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double(*args[1:], **kwargs)
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        return func(*args, **kwargs)
