"""What is put on instances of modules and taken off again: forwards and attributes of fold3d's, hooks of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fold3d._C import BlockForward

_KNOWN = ("fold3d.", "torch.", "transformers.", "accelerate.", "peft.")
"""Whose hooks are right in a model that is cut: spectral norms, noise on embeddings, gradients of embeddings."""


def is_users(hook: Callable[..., Any], known: tuple[str, ...] = _KNOWN) -> bool:
    """Returns whether the hook's code lies in none of the `known` packages."""
    return not str(getattr(hook, "__module__", "")).startswith(known)


def users_hooks(module: nn.Module, *, backward: bool = True) -> Iterator[Callable[..., Any]]:
    """Yields the user's hooks of this module: those of its forward, and of its backward if asked."""
    stores = [module._forward_pre_hooks, module._forward_hooks]
    if backward:
        stores += [module._backward_pre_hooks, module._backward_hooks]
    yield from filter(is_users, chain.from_iterable(store.values() for store in stores))


def drop_hooks(module: nn.Module, unwanted: Callable[[Callable[..., Any]], bool]) -> None:
    """Takes the unwanted hooks of the forward off the module itself."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if unwanted(hook)]:
            del hooks[number]


def is_ours(hook: Callable[..., Any]) -> bool:
    """Returns whether it is a hook of fold3d's."""
    return str(getattr(hook, "__module__", "")).startswith("fold3d.")


def wrap(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Puts `forward` on the module; returns what takes it off, unless somebody put theirs around it since."""
    own = vars(module).get("forward")
    module.forward = forward

    def undo() -> None:
        if vars(module).get("forward") is not forward:
            return
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo


_WHOLE_ATTRIBUTES = "_fold3d_whole_attributes"
_WHOLE_SHAPE = "_fold3d_whole_shape"


def replace_attributes(module: nn.Module, values: Mapping[str, Any]) -> Callable[[], None]:
    """Gives a module the attributes of a shard, such as its number of heads; returns what gives it the whole ones back.

    Copies by `drop_wrappers` have the whole ones.
    """
    own = vars(module)
    whole: dict[str, Any] = own.setdefault(_WHOLE_ATTRIBUTES, {})
    for name, value in values.items():
        whole.setdefault(name, getattr(module, name))
        setattr(module, name, value)

    def undo() -> None:
        _restore_attributes(module)

    return undo


def _restore_attributes(module: nn.Module) -> None:
    for name, value in vars(module).pop(_WHOLE_ATTRIBUTES, {}).items():
        setattr(module, name, value)


def set_whole_shape(parameter: Tensor, shape: Sequence[int]) -> None:
    """Notes on a parameter that holds a part what shape the whole one has; the parameter keeps it."""
    vars(parameter)[_WHOLE_SHAPE] = torch.Size(shape)


def whole_shape(tensor: Tensor) -> torch.Size:
    """Returns the shape of the whole parameter of which `tensor` holds a part; its own where it is no part."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.shape
    found: torch.Size = vars(tensor).get(_WHOLE_SHAPE, tensor.shape)
    return found


def drop_wrappers(copied: nn.Module) -> None:
    """Takes functions that were put on instances (a wrapper, or SplitModel's), and fold3d's hooks, off a deep copy, and
    gives it back the whole model's attributes.

    They are not copied and would run the original module. Bound methods, such as accelerate's, are bound to the copy.
    """
    for module in copied.modules():
        drop_hooks(module, is_ours)
        _restore_attributes(module)
        if isinstance(vars(module).get("forward"), (FunctionType, BlockForward)):
            del module.forward
