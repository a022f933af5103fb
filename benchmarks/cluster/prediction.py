"""predict_step(): what the simulator says of a system in a scenario; only this file knows its interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.systems import System

PAYLOAD = 1448 / 1514
"""Of a full Ethernet frame as a link counts it, the part that is data: 14 bytes Ethernet, 20 IP, 32 TCP."""
NS_PER_S = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What a scenario does not say; seconds."""

    latency_s: float
    """Of a message, on top of its bytes at full rate."""
    action_s: float
    """Of a compute action, on top of its layers."""
    step_s: float = 0.0
    """Of a step, on top of its pipeline: meeting, vote, bookkeeping."""


def predict_step(
    scenario: Scenario, system: System, costs: Costs, gather_order: Sequence[Sequence[int]] | None = None
) -> float:
    """Returns the simulated seconds of a step of one of fold3d's systems that is not planned by itself.

    Times are the scenario's, the bandwidth is the link's rate less headers.

    Args:
        gather_order: where gradients are gathered early, each stage's buckets (layers) in the order in which they are;
            None: all after the last reduce-scatter, in the order of the forward pass.
    Raises: ConfigError where the schedule does not fit.
    """
    # Imported here: they load torch, which comparing systems does not need.
    from fold3d import schedule as schedules
    from fold3d._C import simulate_step
    from fold3d.plan.cluster_model import ClusterCosts, Work, cluster_model
    from fold3d.plan.costs import pause_bytes

    family, passes = system.family, scenario.micro_batches
    schedule = schedules.generate(
        family.schedule,
        pp=scenario.pp,
        segments=system.segments,
        micro_batches=passes,
        group_size=passes if family.group_size == "m" else None,
    )
    work = Work.even(
        schedule,
        forward=scenario.forward_s / passes,
        backward=scenario.backward_s / passes,
        layers=scenario.layers,
        activation_bytes=scenario.activation_bytes,
        gradient_bytes=scenario.gradient_bytes,
    )
    if family.recompute == "blocks":  # each layer runs again right before its backward
        work = replace(work, backward=tuple(map(sum, zip(work.forward, work.backward, strict=True))))
    if family.offload != "none":
        kept = scenario.saved_bytes if family.recompute == "none" else scenario.activation_bytes
        work = replace(work, stash_bytes=tuple(layers * kept for layers in work.layers))
        schedule = schedules.lower(schedule, reduce=scenario.dp > 1, offload=[True] * len(work.layers))
    bandwidth = scenario.rate_mbit * 1e6 / 8 * PAYLOAD
    cluster = ClusterCosts(
        dp=scenario.dp,
        bandwidth=bandwidth,
        latency=costs.latency_s,
        slice_bytes=pause_bytes(bandwidth),
        preempt=family.preempt,
        action_seconds=costs.action_s,
        copies_share=True,
    )
    if scenario.copy_rate:
        cluster = replace(cluster, copy_bandwidth=scenario.copy_rate)
    model = cluster_model(work, cluster, pp=scenario.pp, dp_sync="blocking" if family.waits else family.dp_sync)
    if model.dp_sync == "early":
        if gather_order is None:
            model.early_gathers = 0
        else:
            model.gather_order = [list(of_stage) for of_stage in gather_order]
    step = simulate_step(schedule, model, breakdown=False)
    return step.step_ns / NS_PER_S + costs.step_s
