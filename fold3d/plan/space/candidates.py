"""The settings that the search tries: orders, buckets, ways of DP.sync; and the paper's heuristic."""

from __future__ import annotations

from collections.abc import Sequence

from fold3d.offload import Offload
from fold3d.plan.constraints import Constraints
from fold3d.plan.job import Job
from fold3d.plan.layout import Layout, layouts_of
from fold3d.plan.memory.spared import Spared
from fold3d.plan.space import bucket_bytes, group_size, offload, recompute, schedule
from fold3d.plan.strategy import Modes, Ranges
from fold3d.plan.trial import Order
from fold3d.recompute import Recompute


def orders(job: Job, constraints: Constraints, segments: int) -> list[Order]:
    """Returns the schedules to try with so many segments; the plainest first."""
    so_far = {"segments": segments}
    return [
        Order(name, size)
        for name in schedule.KNOB.values(job, constraints, so_far)
        for size in group_size.KNOB.values(job, constraints, so_far | {"schedule": name})
    ]


def spared_from(constraints: Constraints) -> Spared:
    """Returns what the user has decided to recompute and to offload; nothing where they have not."""
    again, leaves = recompute.KNOB.fixed(constraints), offload.KNOB.fixed(constraints)
    return Spared(again or Recompute(), leaves or Offload())


def layouts(job: Job, constraints: Constraints, ranges: Ranges) -> list[Layout]:
    """Returns the cut with every bucket size that makes a difference, from small buckets to large ones."""
    found: list[Layout] = []
    for layout in layouts_of(job, ranges, bucket_bytes.KNOB.values(job, constraints, {}), spared_from(constraints)):
        if not found or layout.buckets != found[-1].buckets:
            found.append(layout)
    return found


def uniform_modes(job: Job, layout: Layout, mode: str) -> Modes:
    """Returns the same mode for all buckets."""
    return tuple((mode,) * len(layout.of_stage(stage, job.pp)) for stage in range(job.pp))


def mixed_modes(job: Job, layout: Layout, order: Sequence[Sequence[int]], early: int) -> Modes:
    """Returns "early" for the first `early` gathers of each stage's `order`, "zero1" for all others."""
    modes = []
    for stage in range(job.pp):
        first = set(order[stage][:early])
        modes.append(tuple("early" if n in first else "zero1" for n in range(len(layout.of_stage(stage, job.pp)))))
    return tuple(modes)


def heuristic_segments(job: Job, counts: Sequence[int]) -> int:
    """Returns the number of segments that Fold3D chooses (section IV): the most with which PP.sync and DP.sync together
    take no longer than the computing that hides them."""
    profile = job.profile
    compute = (sum(profile.forward) + sum(profile.backward)) / job.pp * job.micro_batches
    gradients = sum(profile.gradient_bytes.values()) / job.pp
    dp_sync = 2 * (job.dp - 1) / job.dp * gradients / job.network.dp_bandwidth
    message = max(profile.activation_bytes) / job.network.pp_bandwidth + job.network.pp_latency
    best = counts[0]
    for segments in counts:
        pp_sync = (2 * segments - 1) * job.micro_batches * message if job.pp > 1 else 0.0
        if dp_sync + pp_sync > compute:
            break
        best = segments
    return best
