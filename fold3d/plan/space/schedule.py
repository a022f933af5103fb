"""The schedule, by name."""

from __future__ import annotations

from fold3d.plan.space.knob import Knob


def default(segments: int) -> str:
    """Returns the schedule where nothing is planned."""
    return "aiao" if segments > 1 else "1f1b"


KNOB = Knob(
    name="schedule",
    help="a name listed by `fold3d schedules`, or a CSV file",
    parse=str,
)
