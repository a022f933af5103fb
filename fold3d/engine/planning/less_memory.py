"""LessMemory: what a rank is told of its memory: how much it should need over a step, and what would help."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fold3d import _C
from fold3d.config import ParallelConfig
from fold3d.plan.job import Job
from fold3d.plan.memory.changes import cheapest_changes, predicted_curves, usual_changes
from fold3d.plan.strategy import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class LessMemory:
    """Of one engine."""

    job: Job | None
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
