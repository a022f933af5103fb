"""How gradients are summed over the replicas."""

from __future__ import annotations

from collections.abc import Sequence

from fold3d.config import DP_SYNC
from fold3d.errors import ConfigError
from fold3d.plan.constraints import Constraints
from fold3d.plan.job import Job
from fold3d.plan.space.knob import Knob, SoFar
from fold3d.plan.strategy import MIXED, Strategy

DEFAULT = "early"


def _candidates(job: Job, constraints: Constraints, so_far: SoFar) -> Sequence[str]:
    """Returns ways for all buckets; where it is free, the search mixes early and zero1, too."""
    return [DEFAULT] if job.dp == 1 else [DEFAULT, "zero1"]


def _check(value: str, constraints: Constraints) -> None:
    if value not in DP_SYNC and not (value == MIXED and constraints.modes):
        raise ConfigError(f"dp_sync={value!r}: must be one of {', '.join(DP_SYNC)}, or None to choose")


def _flag(value: str, strategy: Strategy) -> str | None:
    return None if strategy.dp == 1 or value == MIXED else value


KNOB = Knob(
    name="dp_sync",
    help=f"how gradients are summed over the replicas: {', '.join(DP_SYNC)}",
    parse=str,
    candidates=_candidates,
    check=_check,
    flag=_flag,
)
