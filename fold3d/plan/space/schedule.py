"""The order of a step: into how many segments the model is folded, the schedule by name, and its group size."""

from __future__ import annotations

from fold3d import schedule as schedules
from fold3d.errors import ConfigError
from fold3d.plan.space.knob import Knob
from fold3d.plan.strategy import Constraints

SCHEDULES = frozenset(info.name for info in schedules.registry() if info.uses_group_size)
"""Names of the schedules that have a group size."""


def default(segments: int) -> str:
    """Returns the schedule where nothing is planned."""
    return "aiao" if segments > 1 else "1f1b"


def _check_segments(value: int, constraints: Constraints) -> None:
    if value < 1:
        raise ConfigError(f"segments={value}: must be at least 1")


def _check_group_size(value: int | None, constraints: Constraints) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"group_size={value}: must be at least 1")
    if value is not None and constraints.schedule not in (None, *SCHEDULES):
        raise ConfigError(
            f"group_size={value} has no effect on schedule={constraints.schedule!r}; leave it out or set "
            "schedule='fold' or 'kfkb'"
        )


SEGMENTS = Knob(
    name="segments", help="segments of the model, each cut into pp chunks", parse=int, check=_check_segments
)
KNOB = Knob(name="schedule", help="a name listed by `fold3d schedules`, or a CSV file", parse=str)
GROUP_SIZE: Knob[int | None] = Knob(
    name="group_size",
    help="micro-batches that pass a segment before the next one starts (schedule fold); k of schedule kfkb",
    parse=int,
    check=_check_group_size,
    flag=lambda value, strategy: None if value is None else str(value),
)
