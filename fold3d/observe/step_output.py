"""StepOutput: what one optimizer step reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fold3d.observe.step_breakdown import StepBreakdown


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one optimizer step reports; the same on every rank, but for the breakdown."""

    loss: torch.Tensor
    """Loss of the global batch, scalar."""
    grad_norm: torch.Tensor
    """Global gradient norm before clipping, scalar, on the engine's device; reading its value waits for the step's
    kernels. With gradient_delay=1 it is that of the gradients that the step applied, those of the step before."""
    make_breakdown: Callable[[], StepBreakdown] = field(repr=False)
    """Makes `breakdown`."""

    @cached_property
    def breakdown(self) -> StepBreakdown:
        """Where this rank's time went. Computed when it is first read, which costs CPU time between steps."""
        return self.make_breakdown()
