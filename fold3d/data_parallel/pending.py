"""PendingGradient: what `.grad` holds while the gradients of a step are not in it, so that nobody works on nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from fold3d.errors import ConfigError
from fold3d.torch_private import in_backward

_ADD = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class PendingGradient(Tensor):
    """Has the shape, dtype and device of a parameter's gradient, and no values: reading or writing them raises.

    Attributes:
        taken: the optimizer has stepped; zeroing changes nothing any more, and is let pass.
    """

    of_parameter: str
    taken: bool

    @staticmethod
    def of(name: str, parameter: Parameter) -> PendingGradient:
        """Returns one for a parameter."""
        gradient: PendingGradient = torch.Tensor._make_wrapper_subclass(
            PendingGradient,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
            requires_grad=False,
        )
        gradient.of_parameter, gradient.taken = name, False
        return gradient

    def mark(self, *, taken: bool) -> None:
        """Notes whether the optimizer has stepped."""
        self.taken = taken

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PendingGradient))
        if func in _ADD and in_backward():
            return first  # a backward pass that adds to it; the hook behind it (Reducer) says what is wrong with that
        if func is torch.ops.aten.detach.default:
            return first
        if first.taken and func in _ZERO:
            return first if func is _ZERO[0] else None
        raise first.error()

    def error(self) -> ConfigError:
        """Returns what is raised for whoever wants the values."""
        if self.taken:
            why = "optimizer.step() has taken the summed gradients"
        else:
            why = "the summed gradients are not in .grad, where an attached optimizer takes them from elsewhere"
        return ConfigError(
            f"{self.of_parameter}.grad was read or changed, but {why}; to see and change them pass "
            "reads_gradients=True to Engine.run; with fold3d.Trainer read them in on_pre_optimizer_step of a callback "
            "or in an overridden training_step, which it knows of before training begins. For the norm alone there is "
            "grad_norm, for clipping clip_grad_norm"
        )

    def numpy(self, *, force: bool = False) -> Any:
        """Raises."""
        raise self.error()

    def tolist(self) -> Any:
        """Raises."""
        raise self.error()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingGradient({self.of_parameter!r}, shape={tuple(self.shape)}, dtype={self.dtype})"
