"""Linear layers, as torch's nn.Linear or as transformers' Conv1D, which holds its weight the other way round."""

from __future__ import annotations

import sys
from functools import cache
from typing import cast

import torch
from torch import Tensor, nn


def is_linear(module: nn.Module) -> bool:
    """Returns whether the module is one linear layer, computed by torch's or transformers' own code."""
    conv1d = _conv1d()
    forward = type(module).forward
    return forward is nn.Linear.forward or (conv1d is not None and forward is conv1d.forward)


def is_transposed(module: nn.Module) -> bool:
    """Returns whether the weight of a linear module is [in, out] instead of [out, in]."""
    return not isinstance(module, nn.Linear)


def matmul(module: nn.Module, x: Tensor) -> Tensor:
    """Returns what a linear module computes, without its bias."""
    weight = cast(Tensor, module.weight)
    if is_transposed(module):
        return torch.matmul(x, weight)
    return nn.functional.linear(x, weight)


def widths(module: nn.Module) -> tuple[str, str]:
    """Returns the attributes of a linear module that say how long the dimensions of its weight are."""
    return ("nx", "nf") if is_transposed(module) else ("out_features", "in_features")


@cache
def _loaded_conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return cast(type[nn.Module], Conv1D)


def _conv1d() -> type[nn.Module] | None:
    return _loaded_conv1d() if "transformers.pytorch_utils" in sys.modules else None
