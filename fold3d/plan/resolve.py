"""Settings that are "auto": which of them need no measurement, and what a choice makes of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fold3d import schedule as schedules
from fold3d.config import AUTO, ParallelConfig
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.plan.choice import Choice


def settle_segments(config: ParallelConfig, dp: int) -> ParallelConfig:
    """Returns `config` with a number of segments where only one makes sense; else the planner chooses one.

    Args:
        dp: replicas, resolved.
    Raises: ConfigError when memory_limit is given and the planner has nothing to decide.
    """
    settled = replace(config, segments=_only_segments(config, dp))
    if config.memory_limit is not None and not needs_planner(settled, dp):
        alone = "one process has nothing to spread; remove it"
        all_set = (
            'everything that memory depends on is set; remove it, or set schedule, group_size or dp_sync to "auto"'
        )
        why = alone if dp * config.pp == 1 else all_set
        raise ConfigError(f"memory_limit={config.memory_limit} has no effect: {why}")
    return settled


def needs_planner(config: ParallelConfig, dp: int) -> bool:
    """Returns whether something is left that the planner must see the model for.

    Args:
        config: from `settle_segments`.
    """
    if config.segments == AUTO:
        return True
    open_order = config.schedule == AUTO or (config.schedule == "fold" and config.group_size == AUTO)
    open_ways = dp > 1 and config.dp_sync == AUTO
    return config.memory_limit is not None and dp * config.pp > 1 and (open_order or open_ways)


def _only_segments(config: ParallelConfig, dp: int) -> int | str:
    name = config.schedule
    if config.segments != AUTO:
        return config.segments
    if name.endswith(".csv"):
        return schedules.load_csv(name).segments
    folds = name == AUTO or any(info.name == name and info.uses_segments for info in schedules.registry())
    return 1 if not folds or dp * config.pp == 1 else AUTO


def with_choice(config: ParallelConfig, choice: Choice) -> ParallelConfig:
    """Returns `config` with what the planner chose for everything that was "auto"."""
    return replace(
        config,
        segments=choice.segments,
        schedule=choice.schedule if config.schedule == AUTO else config.schedule,
        group_size=choice.group_size if config.group_size == AUTO and choice.group_size else config.group_size,
        bucket_bytes=choice.bucket_bytes if config.bucket_bytes is None and choice.modes else config.bucket_bytes,
    )
