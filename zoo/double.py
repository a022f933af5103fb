"""InDouble: what a model's code computes in float32, whatever its weights, is computed in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InDouble(TorchFunctionMode):
    """In its body conversions to float32 are such to float64.

    Models normalise and take softmaxes in float32 even where all else is in float64. Gradients that are summed in
    another order there differ by that precision, which says nothing of a cut.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func` with float64 wherever float32 was asked for."""
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        named = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return func(*args, **named)
