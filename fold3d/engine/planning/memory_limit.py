"""How much memory a rank may use: the one rule for whether the planner is asked, and for what it plans with."""

from __future__ import annotations

import torch

from fold3d.config import ParallelConfig
from fold3d.device import total_memory

_OF_DEVICE = 0.9
"""Share of an accelerator's memory that is planned with; the rest is the libraries' and lost between allocations."""


def memory_limit(config: ParallelConfig, device: torch.device) -> int | None:
    """Returns the bytes a rank may use; None for host memory, which others use, too, unless the user says how much."""
    if config.memory_size is not None:
        return config.memory_size
    total = total_memory(device)
    return None if total is None else int(_OF_DEVICE * total)
