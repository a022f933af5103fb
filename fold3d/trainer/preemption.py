"""PreemptionCallback: all ranks save a checkpoint after the same step when one of them is told to end."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from fold3d.comms.world_group import WorldGroup


class PreemptionCallback(JITCheckpointCallback):
    """The stock callback of `enable_jit_checkpoint`, on whose signal all ranks act together.

    SIGTERM reaches processes at different moments, or only one of them, but all ranks write a checkpoint. So after each
    step they tell each other whether one has been asked to end: one small exchange per step.
    """

    trainer: Any
    jit_manager: Any

    def __init__(self, stock: Any, world: WorldGroup):
        super().__init__()  # type: ignore[no-untyped-call]
        self.trainer, self.jit_manager = stock.trainer, stock.jit_manager
        self._world = world

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Nothing: the other ranks do not know of the signal yet."""

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Nothing: the other ranks do not know of the signal yet."""

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Nothing: the other ranks do not know of the signal yet."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Saves and stops if a rank has been asked to end; every rank calls."""
        asked = torch.tensor(float(self.jit_manager.is_checkpoint_requested))
        self._world.all_reduce(asked, torch.maximum)
        if not asked:
            return
        control.should_save = False
        control.should_training_stop = True
        self.jit_manager.is_checkpoint_requested = False
        # Written under another name and then renamed: it needs no mark of being incomplete.
        self.trainer._save_checkpoint(self.trainer.model, trial=None)


def together(callback: TrainerCallback, world: WorldGroup) -> TrainerCallback:
    """Returns `callback`, or what takes its place where several ranks have to act on a signal."""
    if type(callback) in (JITCheckpointCallback, PreemptionCallback) and world.topology.world > 1:
        return PreemptionCallback(callback, world)
    return callback
