"""StepOutput: what one optimizer step reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fold3d.observe.step_breakdown import Account


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one optimizer step reports; the same on every rank, but for the account."""

    loss: torch.Tensor
    """Loss of the global batch, scalar."""
    grad_norm: torch.Tensor
    """Global gradient norm before clipping, scalar."""
    make_account: Callable[[], Account] = field(repr=False)
    """Makes `account`."""

    @cached_property
    def account(self) -> Account:
        """Where this rank's time went. Put together when it is first read: between steps the CPU has better to do."""
        return self.make_account()
