"""N: micro-batches that pass a segment before the next segment starts; k of kfkb."""

from __future__ import annotations

from fold3d import schedule as schedules
from fold3d.errors import ConfigError
from fold3d.plan.space.knob import Knob
from fold3d.plan.strategy import Constraints

SCHEDULES = frozenset(info.name for info in schedules.registry() if info.uses_group_size)
"""Names of the schedules that have a group size."""


def _check(value: int | None, constraints: Constraints) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"group_size={value}: must be at least 1")
    if value is not None and constraints.schedule not in (None, *SCHEDULES):
        raise ConfigError(
            f"group_size={value} has no effect on schedule={constraints.schedule!r}; leave it out or set "
            "schedule='fold' or 'kfkb'"
        )


KNOB: Knob[int | None] = Knob(
    name="group_size",
    help="micro-batches that pass a segment before the next one starts (schedule fold); k of schedule kfkb",
    parse=int,
    check=_check,
    flag=lambda value, strategy: None if value is None else str(value),
)
