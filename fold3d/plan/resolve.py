"""Settings that are "auto": which of them need no measurement, what they are where nothing is planned, and what a
strategy that is given back says of them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from fold3d import schedule as schedules
from fold3d.config import AUTO, DEFAULT_BUCKET_BYTES, ParallelConfig
from fold3d.errors import ConfigError, TraceError
from fold3d.plan.programs import Programs
from fold3d.plan.space import dp_sync, registry, schedule
from fold3d.plan.strategy import MIXED, Constraints, Ranges, Strategy, given
from fold3d.recompute import Recompute
from fold3d.trace import Trace

FOLLOWED = ("dp", "tp", "pp", *(knob.name for knob in registry.KNOBS))
"""Settings that a strategy says, beside the number of micro-batches."""


def constraints_of(config: ParallelConfig) -> Constraints:
    """Returns what the user has decided: the settings that knobs are named after, and that are not "auto"."""
    given = {knob: getattr(config, knob.name, None) for knob in registry.KNOBS}
    decided = {knob: value for knob, value in given.items() if value is not None and value != AUTO}
    settings = tuple((knob.name, knob.text(value)) for knob, value in decided.items() if not knob.has_field)
    return Constraints(**{knob.name: value for knob, value in decided.items() if knob.has_field}, settings=settings)


def followed(config: ParallelConfig) -> ParallelConfig:
    """Returns the layout with all that its `strategy` says, as if it were set one by one; the same where there is none.

    How many micro-batches are given is left open where they are divided: the strategy counts the parts.

    Raises: ConfigError for what is no strategy, and for a setting that says something else.
    """
    if config.strategy is None:
        return config
    strategy = given(config.strategy)
    registry.check(Constraints(settings=strategy.settings))
    if config.micro_batch_size == AUTO or config.memory_limit is not None:
        name = "memory_limit" if config.micro_batch_size is None else "micro_batch_size"
        raise ConfigError(f"{name}={getattr(config, name)!r} has no effect with strategy, which leaves nothing open")
    said: dict[str, Any] = {axis: getattr(strategy, axis) for axis in ("dp", "tp", "pp")}
    if config.micro_batch_size is None:
        said["micro_batches"] = strategy.micro_batches
    for knob in registry.KNOBS:
        if strategy.tp == 1 and knob.needs_tp:
            continue
        value = knob.of(strategy)
        if knob.flag(value, strategy) is not None:
            said[knob.name] = value if isinstance(value, (int, str)) else knob.text(value)
    said = dict.fromkeys(("recompute", "offload"), "none") | said
    if config.delay_correction != "none" and not said.get("gradient_delay"):
        raise ConfigError(
            f"delay_correction={config.delay_correction!r} has no effect with the strategy, which has "
            "gradient_delay=0; remove it"
        )
    for field in fields(ParallelConfig):
        mine, its = getattr(config, field.name), said.get(field.name, field.default)
        if field.name in (*FOLLOWED, *said) and mine not in (field.default, its):
            trainers = " (of the Trainer: gradient_accumulation_steps)" if field.name == "micro_batches" else ""
            raise ConfigError(
                f"{field.name}={mine!r}{trainers} contradicts the strategy, which has {its!r}; remove one of them"
            )
    return replace(config, **said)


def fitted(config: ParallelConfig, layout: Trace | None) -> Strategy | None:
    """Returns the strategy that is given, for a model; None where there is none.

    Args:
        config: `followed`; with as many micro-batches as run.
        layout: what the model is cut by; None: it has no blocks that anybody knows of.
    Raises: ConfigError for one of another model, or of another number of micro-batches.
    """
    if config.strategy is None:
        return None
    strategy = given(config.strategy)
    if strategy.micro_batches != config.micro_batches:
        raise ConfigError(
            f"micro_batches={config.micro_batches} contradicts the strategy, which has "
            f"micro_batches={strategy.micro_batches}; change one of them"
        )
    if layout is None:
        if strategy.num_chunks > 1:
            raise ConfigError(f"the strategy has {strategy.num_chunks} chunks, and the model has no blocks to cut at")
        return replace(strategy, ranges=((0, 0),))
    try:
        layout.check_ranges(list(strategy.ranges))
    except TraceError as error:
        blocks = ",".join(f"{first}-{end}" for first, end in strategy.ranges)
        raise ConfigError(f"the strategy's blocks={blocks} are not this model's: {error}") from None
    return strategy


def check_buckets(strategy: Strategy, stage: int, buckets: int) -> None:
    """Raises: ConfigError where a strategy has ways or gathers of other buckets than a stage's."""
    modes = strategy.modes_of(stage, buckets)
    early = {number for number, mode in enumerate(modes) if mode == "early"}
    if len(modes) != buckets or set(strategy.gathers_of(stage, buckets)) != early:
        way = MIXED if strategy.modes else strategy.dp_sync
        raise ConfigError(
            f"stage {stage} has {buckets} buckets of gradients, and the strategy's dp_sync={way} and gather_order are "
            f"of others: it is of a model with other parameters, or of another bucket_bytes than "
            f"{strategy.bucket_bytes}"
        )


def resolve_auto(config: ParallelConfig, dp: int) -> Constraints:
    """Returns the user's constraints, with a number of segments where only one makes sense.

    Args:
        dp: replicas, resolved.
    Raises: ConfigError for what does not fit together, and when memory_limit is given and the planner has nothing to
        decide.
    """
    constraints = replace(constraints_of(config), segments=_only_segments(config, dp))
    registry.check(constraints)
    if config.strategy is not None:
        return constraints
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
    if config.strategy is not None:
        return False
    if constraints.segments is None:
        return True
    is_open_family = constraints.schedule in schedule.SCHEDULES and constraints.group_size is None
    open_order = constraints.schedule is None or is_open_family
    open_ways = dp > 1 and constraints.dp_sync is None
    open_spared = not {"recompute", "offload"} <= set(dict(constraints.settings))
    spread = dp * config.pp > 1 and (open_order or open_ways)
    return limited and (spread or open_spared or config.micro_batch_size == AUTO)


def _only_segments(config: ParallelConfig, dp: int) -> int | None:
    name = config.schedule
    if config.given_segments is not None:
        return config.given_segments
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
