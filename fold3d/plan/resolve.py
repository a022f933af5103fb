"""Settings that are "auto": which of them need no measurement, and what they are where nothing is planned."""

from __future__ import annotations

from dataclasses import replace

from fold3d import schedule as schedules
from fold3d.config import AUTO, DEFAULT_BUCKET_BYTES, ParallelConfig
from fold3d.errors import ConfigError
from fold3d.plan.constraints import Constraints
from fold3d.plan.programs import Programs
from fold3d.plan.space import dp_sync, group_size, registry, schedule
from fold3d.plan.strategy import Ranges, Strategy
from fold3d.recompute import Recompute


def constraints_of(config: ParallelConfig) -> Constraints:
    """Returns what the user has decided: the settings that knobs are named after, and that are not "auto"."""
    given = {knob: getattr(config, knob.name, None) for knob in registry.KNOBS}
    decided = {knob: value for knob, value in given.items() if value is not None and value != AUTO}
    settings = tuple((knob.name, knob.text(value)) for knob, value in decided.items() if not knob.has_field)
    return Constraints(**{knob.name: value for knob, value in decided.items() if knob.has_field}, settings=settings)


def resolve_auto(config: ParallelConfig, dp: int) -> Constraints:
    """Returns the user's constraints, with a number of segments where only one makes sense.

    Args:
        dp: replicas, resolved.
    Raises: ConfigError for what does not fit together, and when memory_limit is given and the planner has nothing to
        decide.
    """
    constraints = replace(constraints_of(config), segments=_only_segments(config, dp))
    registry.check(constraints)
    if config.memory_limit is not None and not needs_planner(config, constraints, dp, limited=True):
        raise ConfigError(
            f"memory_limit={config.memory_limit} has no effect: everything that memory depends on is set; remove it, "
            'or set schedule, group_size, dp_sync, recompute, offload or micro_batch_size to "auto"'
        )
    return constraints


def needs_planner(config: ParallelConfig, constraints: Constraints, dp: int, *, limited: bool) -> bool:
    """Returns whether something is left that the planner must see the model for.

    Args:
        constraints: from `resolve_auto`.
        limited: there is a limit to a rank's memory, the user's or the device's.
    """
    if constraints.segments is None:
        return True
    is_open_family = constraints.schedule in group_size.SCHEDULES and constraints.group_size is None
    open_order = constraints.schedule is None or is_open_family
    open_ways = dp > 1 and constraints.dp_sync is None
    open_spared = not {"recompute", "offload"} <= set(dict(constraints.settings))
    spread = dp * config.pp > 1 and (open_order or open_ways)
    return limited and (spread or open_spared or config.micro_batch_size == AUTO)


def _only_segments(config: ParallelConfig, dp: int) -> int | None:
    name = config.schedule
    if isinstance(config.segments, int):
        return config.segments
    if name.endswith(".csv"):
        return schedules.load_csv(name).segments
    only = None if name == AUTO else schedules.only_segments(name)
    return 1 if only is None and dp * config.pp == 1 else only


def programs_of(config: ParallelConfig, constraints: Constraints, dp: int) -> Programs:
    """Returns the programs of settings that leave the number of segments open no more."""
    assert constraints.segments is not None, "the planner decides first"
    return Programs(
        constraints.schedule or schedule.default(constraints.segments),
        constraints.group_size,
        dp=dp,
        pp=config.pp,
        segments=constraints.segments,
        micro_batches=config.micro_batches,
        recompute=None if config.recompute == AUTO else Recompute.parse(config.recompute),
    )


def unplanned(config: ParallelConfig, constraints: Constraints, dp: int, ranges: Ranges) -> Strategy:
    """Returns the strategy where the planner was not asked: defaults for what is free.

    Args:
        ranges: blocks of every chunk, segments * pp.
    Raises: ConfigError for a setting that then has no effect.
    """
    others = registry.in_settings(config.tp)
    given = {knob.name: knob.text(knob.default) for knob in others} | dict(constraints.settings)
    settings = tuple((knob.name, given[knob.name]) for knob in others)
    registry.check(replace(constraints, settings=settings))  # with what is nothing where nobody plans it
    return Strategy(
        dp=dp,
        pp=config.pp,
        tp=config.tp,
        micro_batches=config.micro_batches,
        ranges=ranges,
        schedule=constraints.schedule or schedule.default(constraints.segments or 1),
        group_size=constraints.group_size,
        dp_sync=constraints.dp_sync or dp_sync.DEFAULT,
        bucket_bytes=DEFAULT_BUCKET_BYTES if constraints.bucket_bytes is None else constraints.bucket_bytes,
        settings=settings,
    )
