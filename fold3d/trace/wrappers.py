"""What is put on instances of modules and taken off again: forwards, attributes of a shard; and copies without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fold3d._C import BlockForward
from fold3d.trace.users_hooks import drop_hooks, is_ours


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
