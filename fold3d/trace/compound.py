"""Compound parameters: those whose values are more than one plain tensor, as quantised weights have them.

A library that quantises keeps packed numbers with their scales: in tensors that hang on the parameter (bitsandbytes,
which moves them to the module later), or in a parameter that is made of several tensors (torchao). Nothing here knows a
library. Such parameters are frozen; they are placed, moved and let go of with all that belongs to them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MARK = "_fold3d_compound"


def is_compound(parameter: Any) -> bool:
    """Whether the parameter's values are more than its own tensor, are going to be (a subclass whose `to` converts it,
    as bitsandbytes' do), or were, where another rank has them."""
    if is_traceable_wrapper_subclass(parameter) or _MARK in vars(parameter):
        return True
    kind = type(parameter)
    if kind.__module__.startswith(("torch.", "fold3d.")):
        return False
    return kind.to is not Tensor.to or next(_tensors_in(vars(parameter)), None) is not None


def mark_compound(parameter: Tensor) -> None:
    """Notes on a plain parameter that it stands for a compound one."""
    vars(parameter)[_MARK] = True


def holders(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules, with their names, that hold a compound parameter themselves."""
    for name, module in model.named_modules():
        if any(is_compound(one) for one in module._parameters.values() if one is not None):
            yield name, module


def parts_of(parameter: Tensor) -> list[Tensor]:
    """Returns the plain tensors that a parameter is made of, each memory once; itself where it is one."""
    found = {id(one): one for one in (*_plain(parameter), *_tensors_in(vars(parameter)))}
    memories: dict[int, Tensor] = {}
    for one in found.values():
        memories.setdefault(one.untyped_storage()._cdata, one)
    return list(memories.values())


def bytes_of(parameter: Tensor) -> int:
    """Returns the bytes of a parameter with all that belongs to it."""
    if not is_compound(parameter):
        return parameter.numel() * parameter.element_size()
    return sum(one.numel() * one.element_size() for one in parts_of(parameter))


def held(module: nn.Module) -> list[Tensor]:
    """Returns the plain tensors with values of a module's compound parameters, what hangs on the module included, in an
    order that is the same on all ranks."""
    others = {name: value for name, value in vars(module).items() if name not in _OWN}
    parameters = (one for one in module._parameters.values() if one is not None and is_compound(one))
    found = [*(part for one in parameters for part in parts_of(one)), *_tensors_in(others)]
    return list({one.untyped_storage()._cdata: one for one in found if not one.is_meta}.values())


def let_go(module: nn.Module) -> None:
    """The module's compound parameters have gone to other ranks: what the module itself still has of them goes, too."""
    for name, value in list(vars(module).items()):
        if name not in _OWN and next(_tensors_in(value), None) is not None:
            vars(module)[name] = _on_meta(value)


def move(module: nn.Module, device: torch.device) -> None:
    """Moves a module with compound parameters, by its library's own `to`."""
    if any(one.device != device for one in module._parameters.values() if one is not None and not one.is_meta):
        module.to(device)


def prepare_copy(module: nn.Module, memo: dict[int, Any]) -> None:
    """Has copy.deepcopy, with this memo, share what hangs on a module with compound parameters, whose copy computes as
    `compute_as_linear` says."""
    for name, value in vars(module).items():
        if name not in _OWN and not isinstance(value, Tensor) and next(_tensors_in(value), None) is not None:
            memo[id(value)] = value


def compute_as_linear(copied: nn.Module, weight: Callable[[tuple[int, int], torch.dtype], nn.Parameter]) -> None:
    """Has the copy of a quantised linear layer multiply by a weight of its whole shape: kernels of libraries need
    values, and a quantised weight's own shape says nothing. Other modules stay.

    Args:
        weight: makes a frozen parameter of a shape and dtype.
    """
    if not isinstance(copied, nn.Linear) or type(copied).forward is nn.Linear.forward:
        return
    dtype: Any = getattr(copied, "compute_dtype", None)
    if dtype is None:
        dtype = torch.get_default_dtype() if copied.bias is None else copied.bias.dtype
    copied.register_parameter("weight", weight((copied.out_features, copied.in_features), dtype))
    vars(copied)["forward"] = _Linear(copied)


class _Linear:
    """The forward of a copy: a product in the weight's precision."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._module.weight
        bias = None if self._module.bias is None else self._module.bias.to(weight.dtype)
        return functional.linear(x.to(weight.dtype), weight, bias).to(x.dtype)


_OWN = ("_parameters", "_buffers", "_modules")


def _plain(tensor: Any) -> Iterator[Tensor]:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _tensors_in(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yields the tensors in a value, its containers and the attributes of its objects; modules are another's."""
    if isinstance(value, Tensor):
        yield from _plain(value)
    elif isinstance(value, (nn.Module, type)) or callable(value) or not depth:
        return
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors_in(one, depth - 1)
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _tensors_in(one, depth - 1)
    elif hasattr(value, "__dict__"):
        yield from _tensors_in(vars(value), depth - 1)


def _on_meta(value: Any) -> Any:
    memo = {id(one): torch.empty_like(one, device="meta") for one in _tensors_in(value)}
    return copy.deepcopy(value, memo)
