"""Settings that are "auto": which of them need no measurement, and what a choice makes of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fold3d import schedule as schedules
from fold3d.config import AUTO, ParallelConfig

if TYPE_CHECKING:
    from fold3d.plan.choice import Choice


def without_planner(config: ParallelConfig, dp: int) -> ParallelConfig | None:
    """Returns `config` with a number of segments where only one makes sense, None where the planner must choose.

    Args:
        dp: replicas, resolved.
    """
    if config.segments != AUTO:
        return config
    name = config.schedule
    if name.endswith(".csv"):
        return replace(config, segments=schedules.load_csv(name).segments)
    folds = name == AUTO or any(info.name == name and info.uses_segments for info in schedules.registry())
    if not folds or (dp == 1 and config.pp == 1):
        return replace(config, segments=1)
    return None


def with_choice(config: ParallelConfig, choice: Choice) -> ParallelConfig:
    """Returns `config` with what the planner chose for everything that was "auto"."""
    return replace(
        config,
        segments=choice.segments,
        schedule=choice.schedule if config.schedule == AUTO else config.schedule,
        group_size=choice.group_size if config.group_size == AUTO and choice.group_size else config.group_size,
        bucket_bytes=choice.bucket_bytes if config.bucket_bytes is None and choice.modes else config.bucket_bytes,
    )
