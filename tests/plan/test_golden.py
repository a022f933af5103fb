"""What the planner decides for a grid of jobs, to the nanosecond; a change of it has to be wanted.

After a wanted change:  FOLD3D_WRITE_GOLDEN=1 python -m pytest tests/plan/test_golden.py, and read the difference.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from fold3d import schedule as schedules
from fold3d.plan.cluster_model import BucketCost, ClusterCosts, Work
from fold3d.plan.job import TrainingJob
from fold3d.plan.layout import layout_of
from fold3d.plan.measured import plan_gathers
from fold3d.plan.proposal import Proposal
from fold3d.plan.search import decide, recheck, search
from fold3d.plan.simulator import predict
from fold3d.plan.strategy import Constraints, parse
from tests.plan.jobs import make_job

GOLDEN = Path(__file__).parents[1] / "golden" / "plans"
SMALL = {"layers": 8, "micro_batches": 4}

JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "free": ({}, {}),
    "four_stages": ({"pp": 4, "micro_batches": 16, "layers": 8}, {}),
    "one_stage": ({"pp": 1, **SMALL}, {}),
    "one_replica": ({"dp": 1, **SMALL}, {}),
    "alone": ({"dp": 1, "pp": 1, **SMALL}, {}),
    "four_replicas": ({"dp": 4, **SMALL}, {}),
    "three_stages_odd_layers": ({"pp": 3, "layers": 5, "micro_batches": 7}, {}),
    "slow_network": ({"bandwidth": 1e6, **SMALL}, {}),
    "fast_network": ({"bandwidth": 1e10, **SMALL}, {}),
    "first_come": ({"preempt": False, **SMALL}, {}),
    "large_messages": ({"activation_bytes": 1 << 20, **SMALL}, {}),
    "two_segments": (SMALL, {"segments": 2}),
    "one_f_one_b": (SMALL, {"schedule": "1f1b"}),
    "interleaved": (SMALL, {"schedule": "interleaved", "segments": 2}),
    "fold": (SMALL, {"schedule": "fold"}),
    "group_size": (SMALL, {"segments": 4, "group_size": 2}),
    "zero1": (SMALL, {"dp_sync": "zero1"}),
    "early": (SMALL, {"dp_sync": "early"}),
    "serial": (SMALL, {"dp_sync": "serial", "segments": 2}),
    "bucket_bytes": (SMALL, {"bucket_bytes": 1 << 20}),
    "ranges": (SMALL, {"ranges": ((0, 5), (5, 8), (8, 12), (12, 16))}),
    "little_memory": ({"memory_limit": 1, **SMALL}, {}),
    "some_memory": ({"memory_limit": 45_000_000, **SMALL}, {"segments": 4}),
    "enough_memory": ({"memory_limit": 200_000_000, **SMALL}, {}),
}


def ways(stage: tuple[str, ...]) -> str:
    return " ".join(f"{len(list(run))} {way}" for way, run in groupby(stage))


def facts(job: TrainingJob, found: Proposal) -> dict[str, Any]:
    strategy = found.strategy
    assert parse(str(strategy)) == strategy
    layout = layout_of(job, strategy.ranges, strategy.bucket_bytes)
    modes = [strategy.modes_of(stage, layout.buckets_of(stage, job.pp)) for stage in range(job.pp)]
    gathers = strategy.gather_order or ((),) * job.pp
    return {
        "table": found.table.splitlines(),
        "ranges": " ".join(f"{first}-{end}" for first, end in strategy.ranges),
        "schedule": f"{strategy.schedule} {strategy.group_size}",
        "modes": [ways(stage) for stage in modes],
        "gather_order": [" ".join(map(str, stage)) for stage in gathers],
        "bucket_bytes": strategy.bucket_bytes,
        "memory_bytes": found.memory_bytes,
        "step_ms": found.step_ms,
        "ranks": [f"{rank.compute_ms} {rank.bubble_ms} {rank.exposed_dp_ms}" for rank in found.prediction.ranks],
        "early_gathers": found.prediction.early_gathers,
    }


def compare(name: str, found: Any) -> None:
    path = GOLDEN / f"{name}.json"
    if os.environ.get("FOLD3D_WRITE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))


@pytest.mark.gate(cases=8)
@pytest.mark.parametrize("name", JOBS)
def test_the_planner_decides_as_before(name: str) -> None:
    settings, fixed = JOBS[name]
    job, constraints = make_job(**settings), Constraints(**fixed)
    found = {"search": facts(job, search(job, constraints))}
    found["planner"] = facts(job, decide(job, constraints, lambda: True))
    compare(name, found)


def test_rechecking_decides_as_before() -> None:
    job = make_job(layers=8, micro_batches=8)
    found = {}
    for way in ("early", "zero1", "serial"):
        choice = search(job, Constraints(segments=2, schedule="fold", group_size=2, dp_sync=way))
        layout = layout_of(job, choice.strategy.ranges, choice.strategy.bucket_bytes)
        for name, factor in (("same", 1.0), ("slower", 2.0), ("uneven", 1.0)):
            forward = [1e3 * factor * seconds for seconds in layout.forward]
            backward = [1e3 * factor * seconds for seconds in layout.backward]
            if name == "uneven":
                forward[0] *= 3
            better = recheck(job, choice.strategy, forward, backward)
            found[f"{way}, {name}"] = None if better is None else facts(job, better)
    compare("recheck", found)


def test_measured_times_give_the_same_gathers() -> None:
    found = {}
    seconds = ((0.01, 0.02), (0.011, 0.021), (0.012, 0.022), (0.013, 0.023))

    def work(sizes: tuple[tuple[int, ...], ...]) -> Work:
        return Work(
            forward=tuple(forward for forward, _ in seconds),
            backward=tuple(backward for _, backward in seconds),
            activation_bytes=(10_000, 20_000, 30_000, 0),
            buckets=tuple(
                tuple(BucketCost(forward / len(mine), backward / len(mine), size) for size in mine)
                for mine, (forward, backward) in zip(sizes, seconds, strict=True)
            ),
        )

    uneven, even = work(((1_000_000, 2_000_000), (500_000,), (), (3_000_000,))), work(((1_000_000,) * 2,) * 4)
    cluster = ClusterCosts(dp=2, bandwidth=5e7, latency=1e-4, hop_latency=2e-4, slice_bytes=1 << 18)
    mixed = (("early",) * 2, ("early", "zero1"))
    cases = {
        "mixed": (uneven, cluster, mixed),
        "serial": (uneven, cluster, (("serial",) * 2,) * 2),
        "first come": (uneven, replace(cluster, preempt=False), mixed),
        "zero1": (even, cluster, (("zero1",) * 4,) * 2),
        "one replica": (uneven, replace(cluster, dp=1), mixed),
    }
    for name, (costs, where, modes) in cases.items():
        for schedule in ("aiao", "interleaved"):
            made = schedules.lower(schedules.generate(schedule, pp=2, segments=2, micro_batches=6), reduce=where.dp > 1)
            expected = plan_gathers(made, costs, where, modes)
            found[f"{name}, {schedule}"] = [expected.step_ms, expected.gather_order, expected.ranks[0].exposed_dp_ms]
    compare("measured", found)


def test_a_made_up_cluster_gives_the_same_step() -> None:
    found = {}
    made = schedules.generate("aiao", pp=2, segments=4, micro_batches=8)
    work = Work.even(made, forward=0.01, backward=0.02, layers=8, activation_bytes=1_000_000, gradient_bytes=50_000_000)
    for hosts in (1, 2):
        cluster = ClusterCosts(dp=2, bandwidth=1e9, latency=5e-5, ranks_per_host=hosts)
        for way in ("zero1", "early", "blocking", "serial", "unvoted"):
            for size in (None, 10_000_000):
                for early in (None, 2):
                    told = predict(made, work, cluster, dp_sync=way, bucket_bytes=size, early_gathers=early)
                    found[f"{hosts} {way} {size} {early}"] = [told.step_ms, told.early_gathers, told.gather_order]
    compare("simulator", found)
