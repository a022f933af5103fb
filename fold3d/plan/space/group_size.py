"""N: micro-batches that pass a segment before the next segment starts."""

from __future__ import annotations

from fold3d.errors import ConfigError
from fold3d.plan.constraints import Constraints
from fold3d.plan.space.knob import Knob


def _check(value: int | None, constraints: Constraints) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"group_size={value}: must be at least 1")
    if value is not None and constraints.schedule not in (None, "fold"):
        raise ConfigError(
            f"group_size={value} has no effect on schedule={constraints.schedule!r}; leave it out or set "
            "schedule='fold'"
        )


KNOB: Knob[int | None] = Knob(
    name="group_size",
    help="N, micro-batches that pass a segment before the next one starts (schedule fold)",
    parse=int,
    check=_check,
    flag=lambda value, strategy: None if value is None else str(value),
)
