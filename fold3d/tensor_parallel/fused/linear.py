"""What a linear layer has to be so that its product can be fused, and its weight for that."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from fold3d.tensor_parallel.linear import is_linear, is_transposed


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
