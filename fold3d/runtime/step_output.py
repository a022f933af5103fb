"""StepOutput: what one optimizer step reports."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fold3d.runtime.account import Account


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one optimizer step reports; the same on every rank, but for the account."""

    loss: torch.Tensor
    """Loss of the global batch, scalar."""
    grad_norm: torch.Tensor
    """Global gradient norm before clipping, scalar."""
    account: Account
    """Where this rank's time went."""
