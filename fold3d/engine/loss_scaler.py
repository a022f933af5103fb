"""LossScaler: torch's GradScaler, told by the global norm instead of by each rank's own gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fold3d.data_parallel.gradients import Factor
from fold3d.device import is_accelerator

_SKIPPED = "skipped_steps"
"""Key of a state, beside GradScaler's own."""


class ScaledGradients(Protocol):
    """A step's gradients, wherever they are."""

    def grad_norm(self) -> Tensor:
        """Returns their exact global norm, on the rank's device, the same on every rank; all ranks call."""

    def scale(self, coefficient: Factor) -> None:
        """Multiplies them."""

    def abandon(self) -> None:
        """Drops them."""


class LossScaler(torch.amp.GradScaler):
    """The user's GradScaler once an engine has it: `unscale_`, `step` and `update` are called as in any loop.

    Which steps are taken is decided by the exact global norm, and so alike on all ranks. All ranks make the same calls.
    Optimizers without parameters of the engine's are treated as by any GradScaler. As there, scale, norm and verdict
    stay on the device, and `step` is the one place where the host waits for it.

    Attributes:
        skipped_steps: so far; in `state_dict`, too.
    """

    skipped_steps: int
    _gradients: ScaledGradients
    _parameters: Collection[int]
    _verdict: Parameter
    _carrier: Optimizer
    _norm: Tensor | None

    @classmethod
    def adopt(cls, scaler: torch.amp.GradScaler) -> LossScaler:
        """Turns `scaler` into one that an engine can be given with `follow`; it stays the object that it is."""
        if not isinstance(scaler, cls):
            kind = type(scaler)
            made = cls if kind is torch.amp.GradScaler else type(kind.__name__, (cls, kind), {})
            scaler.__class__ = made
            vars(scaler).update(skipped_steps=0, _parameters=(), _norm=None)
        return cast(LossScaler, scaler)

    def follow(self, gradients: ScaledGradients, parameters: Collection[int], device: torch.device) -> None:
        """From now on the gradients of `parameters`, by id, are an engine's."""
        self._gradients, self._parameters, self._norm = gradients, parameters, None
        # GradScaler looks for infinities in an optimizer's gradients; this one carries the verdict and nothing else.
        self._verdict = Parameter(torch.zeros((), device=device))
        self._carrier = _Carrier([self._verdict])

    def count_anew(self) -> None:
        """A training begins: no step of it was skipped."""
        self.skipped_steps = 0

    def scaled(self, loss_fn: Callable[[Module, Any], Tensor]) -> Callable[[Module, Any], Tensor]:
        """Returns `loss_fn` with the gradients of a scaled loss; the loss itself stays as it is. For one step."""

        @functools.cache
        def factor() -> Factor:  # not before a loss is there: in the first step the engine is built meanwhile
            return _as_factor(self.scale(torch.ones_like(self._verdict)).detach())

        @functools.wraps(loss_fn)
        def call(model: Module, batch: Any) -> Tensor:
            share = loss_fn(model, batch)
            loss: Tensor = _ScaledBackward.apply(share, factor())  # type: ignore[no-untyped-call]
            return loss

        return call

    def unscaled_norm(self) -> Tensor | None:
        """Unscales the step's gradients, unless that was done; returns their norm then; all ranks call."""
        if self._norm is not None:
            return None
        self._unscale()
        return self._norm

    def unscale_(self, optimizer: Optimizer) -> None:
        """As GradScaler's; all ranks call. Raises RuntimeError the second time before `update`."""
        if self._is_ours(optimizer):
            self._unscale()
        else:
            super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **named: Any) -> float | None:
        """As GradScaler's: calls `optimizer.step`, unless the gradients of any rank are not finite; all ranks call."""
        if not self._is_ours(optimizer):
            return super().step(optimizer, *args, **named)
        if self._norm is None:
            self._unscale()
        assert self._norm is not None
        result = None
        if bool(torch.isfinite(self._norm)):
            result = optimizer.step(*args, **named)
        else:
            self.skipped_steps += 1
            self._gradients.abandon()
            # GradScaler calls those that look for infinities themselves, and so whoever counts calls, such as a
            # schedule of learning rates, counts this one. Here it finds no gradients, and changes nothing.
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.step(*args, **named)
        super().step(self._carrier)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As GradScaler's: lower after a step with infinite gradients, higher after many without."""
        self._norm = None
        super().update(new_scale)

    def state_dict(self) -> dict[str, Any]:
        """Returns GradScaler's state and how many steps were skipped."""
        return super().state_dict() | {_SKIPPED: self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state of this class, or of GradScaler."""
        super().load_state_dict(state_dict)
        self.skipped_steps = int(state_dict.get(_SKIPPED, 0))

    def _unscale(self) -> None:
        if self._scale is None:
            self.scale(self._verdict.detach())  # no step has run; whoever asks finds gradients of zero
        norm = self._gradients.grad_norm()
        self._verdict.grad = torch.where(torch.isfinite(norm), 0.0, float("inf")).to(self._verdict.dtype)
        super().unscale_(self._carrier)
        assert self._scale is not None
        inverse = _as_factor(self._scale.double().reciprocal())
        self._gradients.scale(inverse)
        self._norm = norm * inverse

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return any(id(one) in self._parameters for group in optimizer.param_groups for one in group["params"])


class _Carrier(torch.optim.Optimizer):
    """Has one parameter, whose gradient tells GradScaler the verdict, and changes nothing in a step."""

    _step_supports_amp_scaling = True
    """GradScaler hands over on the device what it found, and does not wait for it."""

    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The parameter stays as it is."""


def _as_factor(number: Tensor) -> Factor:
    return number if is_accelerator(number.device) else float(number)


class _ScaledBackward(torch.autograd.Function):
    """Is its input; the gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Factor) -> Tensor:
        """Returns `value`."""
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient, scaled."""
        return (gradient * ctx.factor).to(gradient.dtype), None
