"""LossScaler: torch's GradScaler, told by the global norm instead of by each rank's own gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module, Parameter


class LossScaler:
    """Scales losses and decides, from the exact global norm and so alike on all ranks, which steps are taken."""

    def __init__(self, scaler: torch.amp.GradScaler):
        self._scaler = scaler
        # GradScaler looks for infinities in an optimizer's gradients; this one carries the verdict and nothing else.
        self._verdict = Parameter(torch.zeros((), device=scaler._device))
        self._optimizer = torch.optim.SGD([self._verdict], lr=0.0)

    @property
    def inverse(self) -> float:
        """What undoes the scale."""
        return 1.0 / float(self._scaler.get_scale())

    def scaled(self, loss_fn: Callable[[Module, Any], torch.Tensor]) -> Callable[[Module, Any], torch.Tensor]:
        """Returns `loss_fn` with a scaled result."""
        factor = float(self._scaler.scale(torch.ones_like(self._verdict)))
        return lambda model, batch: loss_fn(model, batch) * factor

    @staticmethod
    def is_finite(norm: torch.Tensor) -> bool:
        """Whether the step may be taken."""
        return bool(torch.isfinite(norm))

    def update(self, norm: torch.Tensor) -> None:
        """Adapts the scale after a step: lower when `norm` is not finite, higher after many that were."""
        self._verdict.grad = torch.full_like(self._verdict, 0.0 if self.is_finite(norm) else float("inf"))
        self._scaler.unscale_(self._optimizer)
        self._scaler.step(self._optimizer)
        self._scaler.update()
