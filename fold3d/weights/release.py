"""release(): letting go of the parameters that other ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fold3d.trace.compound import holders, let_go
from fold3d.weights.missing import MissingWeight


def release(model: nn.Module, keep: set[str]) -> None:
    """Moves every parameter whose names are all outside `keep` to the meta device, in place, and frees its
    memory.

    The model, its modules and all names stay; a released parameter is a `MissingWeight`. Tied parameters stay tied,
    buffers stay. With a compound parameter goes what its module has of it. The memory is free once nobody else (an
    optimizer, for one) holds the old parameter.
    """
    compound = [module for _, module in holders(model)]
    for parameter, names in parameter_holders(model):
        if keep.isdisjoint(names) and not isinstance(parameter, MissingWeight):
            replace_parameter(model, names, MissingWeight(parameter, names[0]))
    for module in compound:
        if all(isinstance(one, MissingWeight) for one in module._parameters.values() if one is not None):
            let_go(module)


def is_released(parameter: nn.Parameter) -> bool:
    """Returns whether `release` took the parameter's storage."""
    return isinstance(parameter, MissingWeight)


def parameter_holders(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Returns every parameter with all its names, in the model's order."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return list(found.values())


def replace_parameter(model: nn.Module, names: Sequence[str], parameter: torch.nn.Parameter) -> None:
    """Puts `parameter` in the place of the one that has these names."""
    for name in names:
        holder, _, attribute = name.rpartition(".")
        # setattr and not _parameters[...]: recurrent modules keep a second list of their weights
        setattr(model.get_submodule(holder), attribute, parameter)
