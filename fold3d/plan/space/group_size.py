"""N: micro-batches that pass a segment before the next segment starts."""

from __future__ import annotations

from collections.abc import Sequence

from fold3d.errors import ConfigError
from fold3d.plan.constraints import Constraints
from fold3d.plan.job import Job
from fold3d.plan.space.knob import Knob, SoFar


def _candidates(job: Job, constraints: Constraints, so_far: SoFar) -> Sequence[int | None]:
    if so_far["schedule"] != "fold":
        return [None]
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
    if value is not None and constraints.schedule not in (None, "fold"):
        raise ConfigError(
            f"group_size={value} has no effect on schedule={constraints.schedule!r}; leave it out or set "
            "schedule='fold'"
        )


KNOB: Knob[int | None] = Knob(
    name="group_size",
    help="N, micro-batches that pass a segment before the next one starts (schedule fold)",
    parse=int,
    candidates=_candidates,
    check=_check,
    flag=lambda value, strategy: None if value is None else str(value),
)
