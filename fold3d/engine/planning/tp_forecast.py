"""TpForecast: what TP.sync is expected to cost, and by that how it is hidden, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fold3d.comms.connections import spread_of_shards, warn_of_hosts
from fold3d.comms.world_group import WorldGroup
from fold3d.config import AUTO, TP_WAYS, text_of_bytes
from fold3d.engine.planning import planner
from fold3d.plan.costs import NetworkCosts
from fold3d.plan.job import TrainingJob
from fold3d.plan.layout import layout_of
from fold3d.plan.proposal import Proposal
from fold3d.plan.search import DECISIVE
from fold3d.plan.space.tp_overlap import KNOB, traffic
from fold3d.plan.strategy import Strategy
from fold3d.sharding.plan import ShardingPlan
from fold3d.topology import of_stage
from fold3d.trace import Trace
from fold3d.trace.batches import synthetic_example

logger = logging.getLogger(__name__)

_SECONDS = 0.5
"""For measuring layers, where nothing else is planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TpForecast:
    """Of one step; the same on every rank."""

    bytes: int
    """That a rank of the busiest stage sends in its tensor-parallel group."""
    computing: float
    """Seconds that it computes."""
    exposed: float
    """Seconds that it waits for TP.sync, hidden as was decided."""
    bandwidth: float
    """Bytes per second, measured."""
    other: float | None = None
    """Seconds that forwards and backwards would take hidden in the next best way; None where there was no choice."""

    @property
    def text(self) -> str:
        """In words."""
        return (
            f"{text_of_bytes(self.bytes)} a step from each process, at the measured {self.bandwidth / 1e6:.1f} MB/s, "
            f"for which it waits about {1e3 * self.exposed:.0f} ms"
        )


def forecast_of(job: TrainingJob, proposed: Proposal) -> TpForecast:
    """Returns what the planner expects of what it proposes."""
    busiest = max(proposed.prediction.ranks, key=lambda rank: rank.exposed_tp_ms)
    return TpForecast(
        bytes=_bytes(job, proposed.strategy),
        computing=busiest.compute_ms / 1e3,
        exposed=busiest.exposed_tp_ms / 1e3,
        bandwidth=job.network.tp_bandwidth,
        other=next((ms / 1e3 for name, ms in proposed.second_best if name == KNOB.name), None),
    )


def predict_tp_sync(
    training: planner.Training,
    recording: Trace,
    layout: Trace,
    strategy: Strategy,
    world: WorldGroup,
    example: Mapping[str, Any] | None,
    sharding: ShardingPlan,
) -> tuple[Strategy, TpForecast | None]:
    """Returns a strategy that was not planned, with how TP.sync is hidden where "auto" leaves that open and the
    predicted difference is clear; and what it costs, where it was looked at. All ranks of the job call.

    It is looked at where it is open, or where a tensor-parallel group is spread over hosts.

    Args:
        recording: of this rank's micro-batch.
        layout: what all ranks cut by.
        example: a micro-batch; None: the model makes up one, by which nothing is decided.
    """
    is_open = KNOB.of(strategy) == AUTO and example is not None
    if not is_open and spread_of_shards(world) == 1:
        return strategy, None
    profile = None
    try:
        inputs = synthetic_example(training.model) if example is None else example
        profile = planner.profile_of(replace(training, optimizer=None), recording, inputs, sharding, _SECONDS)
    except Exception as error:  # foreign code with made-up values; nothing depends on it
        logger.info("TP.sync cannot be predicted (%s: %s)", type(error).__name__, error)
    profile = planner.agreed_profile(world, recording, profile, every=True)
    if profile is None:
        return strategy, None
    link = planner.tp_link(profile, world, training)
    topology, nothing = world.topology, float("inf")
    job = TrainingJob(
        trace=layout,
        profile=profile,
        network=link.of(NetworkCosts(pp_latency=0.0, pp_bandwidth=nothing, dp_bandwidth=nothing, hop_latency=0.0)),
        dp=topology.dp,
        pp=topology.pp,
        tp=topology.tp,
        style=topology.style,
        micro_batches=training.config.micro_batches,
    )
    way, other = KNOB.of(strategy), None
    if is_open:
        way = _decided(job, strategy)
        bubbles = (job.micro_batches + job.pp - 1) / job.micro_batches
        other = sorted(_seconds(job, strategy, one)[0] for one in TP_WAYS)[1] * bubbles  # the second best
        strategy = replace(
            strategy, settings=tuple((name, way if name == KNOB.name else text) for name, text in strategy.settings)
        )
    spent, exposed = _seconds(job, strategy, way)
    sent = _bytes(job, strategy)
    return strategy, TpForecast(
        bytes=sent, computing=spent - exposed, exposed=exposed, bandwidth=link.bandwidth, other=other
    )


def warn_of_spread(forecast: TpForecast | None, world: WorldGroup) -> None:
    """Says what it costs where a tensor-parallel group has ranks on several hosts; all ranks of the job call."""
    warn_of_hosts(spread_of_shards(world), world.topology, "" if forecast is None else forecast.text)


def _decided(job: TrainingJob, strategy: Strategy) -> str:
    """Returns the way that is clearly the fastest, or "auto"."""
    if job.profile.halves_factor is None:
        return AUTO  # batches may come that can be divided
    times = {way: _seconds(job, strategy, way)[0] for way in TP_WAYS}
    best, second, _ = order = sorted(times, key=lambda way: times[way])
    close = times[second] < DECISIVE * times[best]
    logger.info(
        "tp_overlap: a step's forwards and backwards are predicted to take %s: %s",
        ", ".join(f"{1e3 * times[way]:.1f} ms with {way}" for way in order),
        "too close to tell, real steps decide" if close else best,
    )
    return AUTO if close else best


def _seconds(job: TrainingJob, strategy: Strategy, way: str) -> tuple[float, float]:
    """Returns how long a rank of the busiest stage computes in a step, and what of that it waits for TP.sync."""
    layout = layout_of(KNOB.costs(job, way), strategy.ranges, strategy.bucket_bytes)
    both = [a + b for a, b in zip(layout.forward, layout.backward, strict=True)]
    waits = [a + b for a, b in zip(layout.forward_tp, layout.backward_tp, strict=True)]
    stages = [
        (sum(of_stage(both, stage, job.pp, job.style)), sum(of_stage(waits, stage, job.pp, job.style)))
        for stage in range(job.pp)
    ]
    spent, waited = max(stages)
    return job.micro_batches * spent, job.micro_batches * waited


def _bytes(job: TrainingJob, strategy: Strategy) -> int:
    """Returns what a rank of the stage with most of it sends in its group in a step."""
    profile, last = job.profile, len(strategy.ranges) - 1
    of_layer = [
        sum(traffic(one, job.tp)[0] for one in (*forward, *backward))
        for forward, backward in zip(profile.tp_forward, profile.tp_backward, strict=True)
    ]
    chunks = [sum(of_layer[lo + (c > 0) : hi + 1 + (c == last)]) for c, (lo, hi) in enumerate(strategy.ranges)]
    most = max(sum(of_stage(chunks, stage, job.pp, job.style)) for stage in range(job.pp))
    return round(job.micro_batches * most)
