"""plan_gathers(): the order of early gathers and the length of a step, from what a run measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fold3d import _C
from fold3d.plan.cluster_model import (
    Cluster,
    Modes,
    Work,
    cluster_model,
    early_gathers_to_try,
    fastest_early_gathers,
    kind_of,
)
from fold3d.plan.simulator import Prediction, RankBreakdown, prediction_of

_TRIES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What the simulator says of a run as it is."""

    step_ms: float
    stages: tuple[RankBreakdown, ...]
    """Where a rank's time goes, by stage."""
    gather_order: tuple[tuple[int, ...], ...]
    """Per stage: its early buckets in the order of their gathers."""

    @classmethod
    def of(cls, prediction: Prediction, gather_order: tuple[tuple[int, ...], ...]) -> Expected:
        """Returns what `prediction` says of a run that gathers in this order."""
        return cls(step_ms=prediction.step_ms, stages=prediction.ranks, gather_order=gather_order)

    def longer_by(self, other_ms: float) -> Expected:
        """Returns what to expect of a step that has so much in it which is not simulated."""
        return replace(self, step_ms=self.step_ms + other_ms)


def plan_gathers(schedule: _C.Schedule, work: Work, cluster: Cluster, modes: Modes) -> Expected:
    """Returns the fastest order of gathers found for a schedule with backwards, and how long a step then takes.

    Args:
        modes: per stage, the way of DP.sync of each bucket.
    """
    kind = kind_of(modes)
    model = cluster_model(work, cluster, pp=schedule.pp, dp_sync=kind, modes=modes)
    if kind in ("early", "mixed") and cluster.dp > 1:
        numbers = early_gathers_to_try(max(map(len, modes)), _TRIES)
        model.early_gathers = fastest_early_gathers(schedule, model, numbers)
    best = prediction_of(_C.simulate_step(schedule, model), early_gathers=None)
    orders = best.gather_order if cluster.dp > 1 else tuple(() for _ in range(schedule.pp))
    return Expected.of(best, orders)
