"""The knobs. The order is that of the text form and of the flags, and each knob's candidates see those before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fold3d.errors import ConfigError
from fold3d.plan.constraints import Constraints
from fold3d.plan.job import Job
from fold3d.plan.space import bucket_bytes, dp_sync, group_size, recompute, schedule, segments
from fold3d.plan.space.knob import Knob
from fold3d.plan.strategy import Strategy

KNOBS: list[Knob[Any]] = [
    segments.KNOB,
    schedule.KNOB,
    group_size.KNOB,
    dp_sync.KNOB,
    bucket_bytes.KNOB,
    recompute.KNOB,
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


def settings_to_try(job: Job, constraints: Constraints) -> Iterator[tuple[tuple[tuple[str, str], ...], Job]]:
    """Yields each combination of the knobs without a field of their own, with the job as it then is."""

    def extended(at: int, so_far: dict[str, Any], job: Job) -> Iterator[tuple[tuple[tuple[str, str], ...], Job]]:
        if at == len(others):
            yield tuple((knob.name, knob.text(so_far[knob.name])) for knob in others), job
            return
        for value in others[at].values(job, constraints, so_far):
            yield from extended(at + 1, so_far | {others[at].name: value}, others[at].costs(job, value))

    others = [knob for knob in KNOBS if not knob.has_field]
    yield from extended(0, {}, job)


def flags_of(strategy: Strategy) -> str:
    """Returns the Trainer's arguments that pin what was decided."""
    flags = [(knob.name, knob.flag(knob.of(strategy), strategy)) for knob in KNOBS]
    return " ".join(f"--{name} {text}" for name, text in flags if text is not None)


def with_settings(constraints: Constraints, settings: tuple[tuple[str, str], ...]) -> Constraints:
    """Returns the same with all knobs of `settings` fixed."""
    return replace(constraints, settings=settings)
