"""compare_settings(): replicas, which keep copies of the same weights, must step them alike."""

from __future__ import annotations

from numbers import Number

from torch.optim import Optimizer

from fold3d.comms.consistency import compare
from fold3d.comms.world_group import WorldGroup


def compare_settings(optimizer: Optimizer, world: WorldGroup) -> None:
    """All ranks of the job call, each with its optimizer. Stages may have their own settings.

    Raises: ConfigError on every rank when replicas of a stage have different ones.
    """
    settings = {
        f"{name} of optimizer group {number}": repr(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, (Number, str, tuple)) or value is None
    }
    compare(world, {}, {"optimizer": type(optimizer).__qualname__} | settings)
