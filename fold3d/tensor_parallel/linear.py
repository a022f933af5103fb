"""Linear layers, as torch's nn.Linear or as transformers' Conv1D, which holds its weight the other way round;
which of them can be fused with their communication.
"""

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


def is_fusable(module: nn.Module, x: Tensor) -> bool:
    """Returns whether a linear module multiplies `x` as it is: not where autocast would cast first, and not where one
    of them is a tensor of a class of its own."""
    weight = module.weight
    return (
        is_linear(module)
        and type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and x.dim() > 1
        and x.is_floating_point()
        and x.dtype == weight.dtype
        and not torch.is_autocast_enabled(x.device.type)
    )


def factor(module: nn.Module) -> Tensor:
    """Returns the weight of a linear module, [in, out]."""
    weight = cast(Tensor, module.weight)
    return weight if is_transposed(module) else weight.t()


def with_bias(module: nn.Module, product: Tensor) -> Tensor:
    """Returns what a linear module computes, from its product, which may be overwritten."""
    bias = cast(Tensor | None, module.bias)
    return product if bias is None else product.add_(bias)
