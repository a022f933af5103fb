"""The schedule, by name."""

from __future__ import annotations

from collections.abc import Sequence

from fold3d.plan.constraints import Constraints
from fold3d.plan.job import Job
from fold3d.plan.space.knob import Knob, SoFar


def default(segments: int) -> str:
    """Returns the schedule where nothing is planned."""
    return "aiao" if segments > 1 else "1f1b"


def _candidates(job: Job, constraints: Constraints, so_far: SoFar) -> Sequence[str]:
    """Returns names, the plainest first."""
    if constraints.group_size is not None:
        return ["fold"]
    return ["1f1b", "gpipe"] if so_far["segments"] == 1 else ["aiao", "interleaved", "fold"]


KNOB = Knob(
    name="schedule",
    help="order of the micro-batches: a name out of `fold3d schedules`, or a CSV file",
    parse=str,
    candidates=_candidates,
)
