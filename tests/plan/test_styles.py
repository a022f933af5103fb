"""Plans of schedules whose segments run back (style v): each chunk's costs on the stage that has it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fold3d import schedule as schedules
from fold3d.errors import ConfigError
from fold3d.plan.cluster_model import BucketCost, ClusterCosts, Work
from fold3d.plan.costs import LayerBytes
from fold3d.plan.job import TrainingJob
from fold3d.plan.layout import Plan, cut, layout_of, simulate
from fold3d.plan.memory import USES
from fold3d.plan.search import recheck, search
from fold3d.plan.simulator import step_ms
from fold3d.plan.strategy import Constraints
from fold3d.topology import LOOP, V, of_stage
from tests.plan.jobs import make_job


def uneven_job(style: str, dp: int = 1) -> TrainingJob:
    """Of three stages: each layer has other times, weights and activations."""
    numbers = random.Random(3)
    job = make_job(dp=dp, pp=3, layers=4, micro_batches=6, bandwidth=1e9, style=style)
    profile, count = job.profile, len(job.profile.layers) - 2
    scale = [numbers.uniform(0.5, 2) for _ in range(count)]
    sizes = {
        name: round(size * times) for (name, size), times in zip(profile.gradient_bytes.items(), scale, strict=True)
    }
    kept = [round(3_000_000 * times) for times in scale]
    nothing = LayerBytes(saved=0, outputs=0, forward=0, backward=0)
    return replace(
        job,
        profile=replace(
            profile,
            forward=(0.0, *(time * times for time, times in zip(profile.forward[1:-1], scale, strict=True)), 0.0),
            backward=(0.0, *(time * times for time, times in zip(profile.backward[1:-1], scale, strict=True)), 0.0),
            layers=(nothing, *(LayerBytes(saved=k, outputs=0, forward=k, backward=k) for k in kept), nothing),
            gradient_bytes=sizes,
            parameter_bytes=sizes,
        ),
    )


@pytest.mark.parametrize(("style", "name"), [(V, "zb_v"), (LOOP, "interleaved")])
def test_stages_need_what_their_chunks_need(style: str, name: str) -> None:
    job = uneven_job(style)
    ranges = cut(job, 2)
    layout = layout_of(job, ranges, 0)
    _, curves = simulate(job, Plan(ranges=ranges, schedule=name, bucket_bytes=0))
    weights = [sum(of_stage(layout.parameter_bytes, stage, 3, style)) for stage in range(3)]
    assert len(set(weights)) == 3
    assert [curve.peak.uses[USES.index("weights")] for curve in curves] == weights
    moments = [curve.peak.uses[USES.index("optimizer")] for curve in curves]
    assert moments == pytest.approx([job.profile.optimizer_bytes * size for size in weights], abs=len(ranges))
    for stage in range(3):
        assert layout.buckets_of(stage, 3) == sum(map(len, of_stage(layout.buckets, stage, 3, style)))


@pytest.mark.parametrize("way", ["early", "zero1", "serial"])
def test_a_step_takes_what_the_simulator_says_of_the_same_work(way: str) -> None:
    job = replace(uneven_job(V, dp=2), action_seconds=0.0, bucket_seconds=0.0)
    ranges = cut(job, 2)
    layout = layout_of(job, ranges, 0)
    work = Work(
        forward=tuple(layout.forward),
        backward=tuple(layout.backward),
        activation_bytes=tuple(layout.activation_bytes),
        head=layout.head,
        update=tuple(layout.update),
        buckets=tuple(tuple(BucketCost(*bucket) for bucket in buckets) for buckets in layout.buckets),
        style=V,
    )
    network = job.network
    cluster = ClusterCosts(
        dp=2,
        bandwidth=network.bandwidth,
        latency=network.pp_latency,
        hop_latency=network.hop_latency,
        slice_bytes=1 << 20,
    )
    made = schedules.generate("zb_v", pp=3, segments=2, micro_batches=job.micro_batches)
    step, _ = simulate(
        replace(job, slice_bytes=1 << 20), Plan(ranges=ranges, schedule="zb_v", modes=way, bucket_bytes=0)
    )
    assert step.step_ns / 1e6 == pytest.approx(step_ms(made, work, cluster, dp_sync=way))


def test_the_search_keeps_to_the_style_of_the_job() -> None:
    job = uneven_job(V)
    found = search(job, Constraints(schedule="zb_v"))
    assert (found.strategy.schedule, found.strategy.segments) == ("zb_v", 2)
    assert search(uneven_job(LOOP)).strategy.schedule != "zb_v"
    again = recheck(job, found.strategy, [20.0] * 6, [40.0] * 6)
    assert again is None or again.strategy.schedule == "zb_v"
    with pytest.raises(ConfigError, match=r"schedule='zb_v' has its chunks on the stages of style v.*style loop"):
        search(uneven_job(LOOP), Constraints(schedule="zb_v"))
    with pytest.raises(ConfigError, match="set segments=2"):
        search(job, Constraints(schedule="zb_v", segments=4))


def test_memory_is_spared_on_the_stages_that_lack_it() -> None:
    job = uneven_job(V)
    needs = search(job, Constraints(schedule="zb_v")).memory_bytes
    less = search(replace(job, memory_limit=int(0.97 * needs)), Constraints(schedule="zb_v"))
    assert less.memory_bytes <= 0.97 * needs and less.strategy.schedule == "zb_v"


def test_k_of_kfkb_is_searched() -> None:
    """Messages that take longer than a forward hide behind larger groups."""
    job = make_job(dp=1, pp=4, layers=2, micro_batches=12, activation_bytes=500_000, bandwidth=2e7)
    fixed = [search(job, Constraints(schedule="kfkb", group_size=k)).step_ms for k in (1, 2, 4, 12)]
    found = search(job, Constraints(schedule="kfkb"))
    assert found.strategy.group_size is not None and found.step_ms <= min(fixed) * 1.001 < fixed[0]
