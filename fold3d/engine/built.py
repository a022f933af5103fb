"""BuiltRank: what one rank trains with, once its model has been recorded, cut and connected."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field

from fold3d.comms.groups import Groups
from fold3d.data_parallel.gradient_sync import GradientSync
from fold3d.engine.step import Step
from fold3d.engine.step_recorder import StepRecorder
from fold3d.faults.supervisor import Supervisor
from fold3d.observe.memory import MemoryWatch
from fold3d.stage.rank_model import RankModel


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltRank:
    """Made by `builder.connect`, on all ranks of the job."""

    cut: RankModel
    groups: Groups
    sync: GradientSync
    recorder: StepRecorder
    step: Step
    supervisor: Supervisor
    memory: MemoryWatch
    undo: ExitStack = field(repr=False)
    """Closes what communicates."""
    process: int = field(default_factory=os.getpid, repr=False)

    def close(self) -> None:
        """Ends the threads and destroys the groups, once the weights are final.

        Does nothing in a forked child, which comes here when its interpreter ends: threads and groups are its parent's.
        """
        if os.getpid() != self.process:
            return
        if self.supervisor.progress.life.failure is None:
            self.sync.finish()
        self.supervisor.close()
        self.undo.close()
