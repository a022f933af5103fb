"""The knobs. The order is that of the text form and of the flags."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from fold3d.errors import ConfigError
from fold3d.plan.job import TrainingJob
from fold3d.plan.space import (
    dp_sync,
    offload,
    recompute,
    schedule,
    tp_overlap,
)
from fold3d.plan.space.knob import Knob
from fold3d.plan.strategy import Constraints, Strategy

KNOBS: list[Knob[Any]] = [
    schedule.SEGMENTS,
    schedule.KNOB,
    schedule.GROUP_SIZE,
    dp_sync.KNOB,
    dp_sync.BUCKET_BYTES,
    recompute.KNOB,
    offload.KNOB,
    offload.OPTIMIZER,
    dp_sync.DTYPE,
    dp_sync.DELAY,
    tp_overlap.KNOB,
]


def check(constraints: Constraints) -> None:
    """Raises ConfigError for a value that cannot be, and for one of a knob that there is not."""
    unknown = set(dict(constraints.settings)) - {knob.name for knob in KNOBS if not knob.has_field}
    if unknown:
        names = ", ".join(knob.name for knob in KNOBS)
        raise ConfigError(f"{sorted(unknown)[0]!r} is nothing that can be chosen: there are {names}")
    for knob in KNOBS:
        value = knob.fixed(constraints)
        if value is not None:
            knob.check(value, constraints)


def constrained(**values: Any) -> Constraints:
    """Returns constraints from values by the knobs' names; None is free. Raises: ConfigError as `check`."""
    fields = {knob.name: values.get(knob.name) for knob in KNOBS if knob.has_field}
    others = {knob.name: knob.text(values[knob.name]) for knob in KNOBS if values.get(knob.name) is not None}
    made = Constraints(**fields, settings=tuple((name, text) for name, text in others.items() if name not in fields))
    check(made)
    return made


def settings_to_try(job: TrainingJob, constraints: Constraints) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yields each combination of values of the knobs without a field of their own, as Strategy.settings."""
    knobs = in_settings(job.tp)
    for values in product(*(knob.values(job, constraints) for knob in knobs)):
        yield tuple((knob.name, knob.text(value)) for knob, value in zip(knobs, values, strict=True))


def in_settings(tp: int) -> list[Knob[Any]]:
    """Returns the knobs that are in the settings of a job with so many ranks in a tensor-parallel group."""
    return [knob for knob in KNOBS if not knob.has_field and (tp > 1 or not knob.needs_tp)]


def with_costs(job: TrainingJob, settings: tuple[tuple[str, str], ...]) -> TrainingJob:
    """Returns the job with what the settings change about its costs."""
    knobs = {knob.name: knob for knob in KNOBS}
    for name, text in settings:
        job = knobs[name].costs(job, knobs[name].read(text))
    return job


def flags_of(strategy: Strategy) -> str:
    """Returns the Trainer's arguments that pin what was decided."""
    said = [knob for knob in KNOBS if strategy.tp > 1 or not knob.needs_tp]
    flags = [(knob.name, knob.flag(knob.of(strategy), strategy)) for knob in said]
    return " ".join(f"--{name} {text}" for name, text in flags if text is not None)
