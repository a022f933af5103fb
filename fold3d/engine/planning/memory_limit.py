"""How much memory a rank may use: the one rule for whether the planner is asked, and for what it plans with;
LessMemory: what a rank is told of its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fold3d import _C
from fold3d.config import ParallelConfig
from fold3d.device import total_memory
from fold3d.plan.job import TrainingJob
from fold3d.plan.memory_options import cheapest_changes, predicted_curves, usual_changes
from fold3d.plan.strategy import Strategy

_OF_DEVICE = 0.9
"""Share of an accelerator's memory that is planned with; the rest is the libraries' and lost between allocations."""


def memory_limit(config: ParallelConfig, device: torch.device) -> int | None:
    """Returns the bytes a rank may use; None for host memory, which others use, too, unless the user says how much."""
    if config.memory_size is not None:
        return config.memory_size
    total = total_memory(device)
    return None if total is None else int(_OF_DEVICE * total)


@dataclass(frozen=True, kw_only=True, slots=True)
class LessMemory:
    """Of one engine: how much memory a rank should need over a step, and what would help."""

    job: TrainingJob | None
    """What the planner was told; None where it was not asked."""
    strategy: Strategy
    config: ParallelConfig
    dp: int
    device: torch.device

    def curves(self) -> list[_C.StageMemory]:
        """Returns the bytes of each stage over a step; none where nothing was planned."""
        return [] if self.job is None else predicted_curves(self.job, self.strategy)

    def changes(self) -> list[str]:
        """Returns the settings with which less memory is needed, the cheapest first."""
        if self.job is not None:
            return [str(change) for change in cheapest_changes(self.job, self.strategy)]
        return usual_changes(
            self.strategy,
            self.dp,
            pool_is_elsewhere=self.device.type != "cpu" or self.config.offload_disk is not None,
            divides=self.config.micro_batch_size is not None,
        )
