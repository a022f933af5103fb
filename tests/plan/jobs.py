"""Jobs for the planner's tests: equal layers, as in benchmarks/cluster, with costs that are given and not measured."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fold3d.plan.costs import LayerBytes, NetworkCosts, Profile
from fold3d.plan.job import TrainingJob
from fold3d.plan.proposal import Proposal
from fold3d.plan.search import search
from fold3d.plan.strategy import Constraints
from fold3d.trace import trace


class Layers(nn.Module):
    """`count` layers of `width` parameters."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, device="meta"))

    def forward(self, x):
        return x + self.weight.mean()


def make_job(
    *,
    dp: int = 2,
    pp: int = 2,
    layers: int = 16,
    micro_batches: int = 8,
    forward: float = 0.317,
    backward: float = 0.775,
    gradient_bytes: int = 12_500_000,
    activation_bytes: int = 8192,
    bandwidth: float = 12.5e6,
    **changes,
) -> TrainingJob:
    """Returns a job; times in seconds of a rank's step, layers and gradient_bytes of one rank; defaults: scenario A."""
    width = gradient_bytes // layers // 4
    model = Layers(layers * pp, width)
    recorded = trace(model, example={"x": torch.zeros(1, 2)})
    count, calls = layers * pp, layers * micro_batches
    profile = Profile(
        forward=(0.0, *(forward / calls,) * count, 0.0),
        backward=(0.0, *(backward / calls,) * count, 0.0),
        layers=tuple(
            LayerBytes(saved=size, outputs=0, forward=size, backward=size)
            for size in (0, *(activation_bytes,) * count, 0)
        ),
        activation_bytes=(activation_bytes,) * count,
        gradient_bytes={f"layers.{layer}.weight": 4 * width for layer in range(count)},
        parameter_bytes={f"layers.{layer}.weight": 4 * width for layer in range(count)},
        update_seconds=1e-9,
        host_update_seconds=1e-8,
        optimizer_bytes=2.0,
        update_bytes=0.0,
        updates_together=False,
        measured=True,
    )
    network = NetworkCosts(pp_latency=2e-4, pp_bandwidth=bandwidth, dp_bandwidth=bandwidth, hop_latency=2e-4)
    values = {"action_seconds": 3e-4, "bucket_seconds": 3e-4}
    return TrainingJob(
        trace=recorded,
        profile=profile,
        network=network,
        dp=dp,
        pp=pp,
        micro_batches=micro_batches,
        **(values | changes),
    )


def evaluate(job: TrainingJob, fixed: Constraints) -> Proposal:
    """Returns the prediction and the gather order for settings that a user has fixed.

    Segments and schedule that are not fixed take their defaults (1; "aiao" with segments, "1f1b" without); the size of
    buckets and the way of DP.sync are chosen where they are not fixed. Raises: ConfigError as `search`.
    """
    segments = fixed.segments or 1
    if fixed.ranges is not None:
        segments = len(fixed.ranges) // job.pp
    name = fixed.schedule or ("fold" if fixed.group_size else "aiao" if segments > 1 else "1f1b")
    return search(job, replace(fixed, segments=segments, schedule=name))
