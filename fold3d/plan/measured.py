"""What follows from what a run measured: the order of early gathers and the length of a step, a job with its times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fold3d import _C
from fold3d.plan.cluster_model import (
    ClusterCosts,
    Modes,
    Work,
    cluster_model,
    early_gathers_to_try,
    fastest_early_gathers,
    kind_of,
)
from fold3d.plan.job import TrainingJob
from fold3d.plan.layout import layout_of
from fold3d.plan.memory import NOTHING, Spared
from fold3d.plan.simulator import Prediction, prediction_of
from fold3d.plan.strategy import Ranges, Strategy

_TRIES = 24


def plan_gathers(schedule: _C.Schedule, work: Work, cluster: ClusterCosts, modes: Modes) -> Prediction:
    """Returns a step of a schedule with backwards, with the fastest order of gathers that was found; no order where
    there is one replica.

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
    return replace(best, gather_order=orders)


def without_recomputed(job: TrainingJob, strategy: Strategy, backward_ms: Sequence[float]) -> Sequence[float]:
    """Returns the backward times of chunks without what their blocks compute again, if they do."""
    spared = Spared.of(strategy.settings)
    if spared.nothing:
        return backward_ms
    kept, again = (layout_of(job, strategy.ranges, strategy.bucket_bytes, how).backward for how in (NOTHING, spared))
    return [ms * (a / b if b else 1.0) for ms, a, b in zip(backward_ms, kept, again, strict=True)]


def with_times(
    job: TrainingJob,
    ranges: Ranges,
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    tp_ms: tuple[Sequence[float], Sequence[float]] | None,
) -> TrainingJob:
    """Returns the job with its layers' times scaled so that each chunk takes what was measured."""
    profile, last = job.profile, len(ranges) - 1
    layers = [range(lo + (chunk > 0), hi + 1 + (chunk == last)) for chunk, (lo, hi) in enumerate(ranges)]

    def scaled(times: Sequence[float], measured_ms: Sequence[float]) -> tuple[float, ...]:
        made = list(times)
        for mine, milliseconds in zip(layers, measured_ms, strict=True):
            whole = sum(times[layer] for layer in mine)
            for layer in mine:
                made[layer] = (times[layer] / whole if whole > 0 else 1 / len(mine)) * milliseconds / 1e3
        return tuple(made)

    forward, backward = scaled(profile.forward, forward_ms), scaled(profile.backward, backward_ms)
    waits = []
    for now, before, of, number in (
        (forward, profile.forward, profile.exposed_forward, 0),
        (backward, profile.backward, profile.exposed_backward, 1),
    ):
        if tp_ms is not None:
            waits.append(scaled(of or (0.0,) * len(now), tp_ms[number]))
        else:
            shares = (wait / time if time > 0 else 0.0 for wait, time in zip(of, before, strict=False))
            waits.append(tuple(share * time for share, time in zip(shares, now, strict=False)))
    return replace(
        job,
        profile=replace(
            profile, forward=forward, backward=backward, exposed_forward=waits[0], exposed_backward=waits[1]
        ),
    )
