"""Segments: parts of the model, each cut into pp chunks."""

from __future__ import annotations

from fold3d.errors import ConfigError
from fold3d.plan.space.knob import Knob
from fold3d.plan.strategy import Constraints


def _check(value: int, constraints: Constraints) -> None:
    if value < 1:
        raise ConfigError(f"segments={value}: must be at least 1")


KNOB = Knob(
    name="segments",
    help="segments of the model, each cut into pp chunks",
    parse=int,
    check=_check,
)
