"""drop_wrappers(): makes copies of modules run themselves."""

from __future__ import annotations

from types import FunctionType

from torch import nn

from fold3d._C import BlockForward


def drop_wrappers(copied: nn.Module) -> None:
    """Takes functions that were put on instances (a wrapper, or SplitModel's) off the modules of a deep copy.

    They are not copied and would run the original module. Bound methods, such as accelerate's, are bound to the copy.
    """
    for module in copied.modules():
        if isinstance(vars(module).get("forward"), (FunctionType, BlockForward)):
            del module.forward
