"""Segments: parts of the model, each cut into pp chunks."""

from __future__ import annotations

from collections.abc import Sequence

from fold3d import schedule as schedules
from fold3d.errors import ConfigError
from fold3d.plan.constraints import Constraints
from fold3d.plan.job import Job
from fold3d.plan.layout import places
from fold3d.plan.space import recompute
from fold3d.plan.space.knob import Knob, SoFar
from fold3d.topology import num_segments

MOST_SEGMENTS = 32


def _candidates(job: Job, constraints: Constraints, so_far: SoFar) -> Sequence[int]:
    """Returns numbers of segments, ascending: all up to 12, then every fourth."""
    if constraints.ranges is not None:
        return [num_segments(len(constraints.ranges), job.pp)]
    again = recompute.KNOB.fixed(constraints)
    if again is not None and len(again.choices) > 1:  # said chunk by chunk
        return [max(1, num_segments(len(again.choices), job.pp))]
    most = max(1, min(MOST_SEGMENTS, num_segments(len(places(job.trace)), job.pp)))
    name = constraints.schedule
    if name is not None and not name.endswith(".csv") and (only := schedules.only_segments(name)) is not None:
        return [only]
    return [n for n in range(1, most + 1) if n <= 12 or n % 4 == 0 or n == most]


def _check(value: int, constraints: Constraints) -> None:
    if value < 1:
        raise ConfigError(f"segments={value}: must be at least 1")


KNOB = Knob(
    name="segments",
    help="parts of the model, each cut into pp chunks",
    parse=int,
    candidates=_candidates,
    check=_check,
)
