"""drop_wrappers(): makes copies of modules run themselves."""

from __future__ import annotations

from types import FunctionType

from torch import nn

from fold3d._C import BlockForward


def drop_wrappers(copied: nn.Module) -> None:
    """Takes functions that were put on instances (a wrapper, or SplitModel's), and fold3d's hooks, off a deep copy.

    They are not copied and would run the original module. Bound methods, such as accelerate's, are bound to the copy.
    """
    for module in copied.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [
                n for n, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith("fold3d.")
            ]:
                del hooks[number]
        if isinstance(vars(module).get("forward"), (FunctionType, BlockForward)):
            del module.forward
