"""N: micro-batches that pass a segment before the next segment starts; k of kfkb."""

from __future__ import annotations

from collections.abc import Sequence

from fold3d import schedule as schedules
from fold3d.errors import ConfigError
from fold3d.plan.constraints import Constraints
from fold3d.plan.job import Job
from fold3d.plan.space.knob import Knob, SoFar

SCHEDULES = frozenset(info.name for info in schedules.registry() if info.uses_group_size)
"""Names of the schedules that have a group size."""


def _candidates(job: Job, constraints: Constraints, so_far: SoFar) -> Sequence[int | None]:
    if so_far["schedule"] not in SCHEDULES:
        return [None]
    if so_far["schedule"] == "kfkb":
        return [k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if k < job.micro_batches] + [job.micro_batches]
    stride = 2 if job.micro_batches <= 8 * job.pp else 4
    sizes = [job.pp]
    while sizes[-1] * stride < job.micro_batches:
        sizes.append(sizes[-1] * stride)
    found = sorted({min(size, job.micro_batches) for size in (*sizes, job.micro_batches)})
    # fold with N = pp is the interleaved schedule.
    return [size for size in found if size != job.pp or constraints.schedule == "fold"]


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
    help="N, micro-batches that pass a segment before the next one starts (schedule fold); k of schedule kfkb",
    parse=int,
    candidates=_candidates,
    check=_check,
    flag=lambda value, strategy: None if value is None else str(value),
)
