"""Forwards put on instances of modules: wrap() puts one on and takes it off, drop_wrappers() rids copies of them."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

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


def drop_wrappers(copied: nn.Module) -> None:
    """Takes functions that were put on instances (a wrapper, or SplitModel's), and fold3d's hooks, off a deep copy.

    They are not copied and would run the original module. Bound methods, such as accelerate's, are bound to the copy.
    """
    for module in copied.modules():
        drop_hooks(module, is_ours)
        if isinstance(vars(module).get("forward"), (FunctionType, BlockForward)):
            del module.forward
