"""search and recheck: against the alternatives, by their own simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fold3d.config import ParallelConfig
from fold3d.errors import ConfigError
from fold3d.plan.layout import Plan, cut, layout_of, simulate
from fold3d.plan.resolve import needs_planner, resolve_auto, unplanned
from fold3d.plan.search import recheck, search
from fold3d.plan.space.dp_sync import WHOLE_CHUNK
from fold3d.plan.strategy import Constraints
from tests.plan.jobs import evaluate, make_job

SLOWER = {"bandwidth": 54.9e6 / 8}
SCENARIOS = {  # benchmarks/cluster: arguments of make_job, and the most that the prediction may be over its limit
    "A": ({}, 1.25),
    "B": (
        {"pp": 4, "micro_batches": 16, "forward": 1.152, "backward": 2.826, "gradient_bytes": 12_830_000, **SLOWER},
        1.12,
    ),
    "C": (
        {"pp": 4, "micro_batches": 64, "forward": 4.608, "backward": 11.304, "gradient_bytes": 12_830_000, **SLOWER},
        1.1,
    ),
    "D": ({"forward": 0.634, "backward": 1.55, "activation_bytes": 174_080}, 1.2),
}


def scenario_limit_ms(job, segments=4):
    """As in benchmarks/cluster/scenarios.py: compute + bubble of four segments, or the network."""
    compute = (sum(job.profile.forward) + sum(job.profile.backward)) * job.micro_batches / job.pp
    bubble = compute * (job.pp - 1) / (segments * job.micro_batches)
    messages = (2 * segments - (job.pp == 2)) * job.micro_batches * job.profile.activation_bytes[0]
    gradients = sum(job.profile.gradient_bytes.values()) / job.pp  # dp = 2: all of them leave once
    return 1e3 * max(compute + bubble, (gradients + messages) / job.network.bandwidth)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_benchmarks_scenarios(name):
    changes, most = SCENARIOS[name]
    job = make_job(**changes)
    choice = search(job)
    ratio = choice.step_ms / scenario_limit_ms(job)
    assert ratio <= most, choice.table

    def default(segments, schedule, kind, bucket_bytes):
        plan = Plan(ranges=cut(job, segments), schedule=schedule, modes=kind, bucket_bytes=bucket_bytes)
        return simulate(job, plan)[0].step_ns / 1e6

    for kind in ("early", "zero1", "serial"):
        for segments, schedule in (
            *((2, "aiao"), (4, "aiao"), (8, "aiao"), (1, "1f1b"), (1, "zb_h1")),
            *((2, "interleaved"), (4, "interleaved")),
        ):
            for bucket_bytes in (0, WHOLE_CHUNK):
                assert choice.step_ms <= default(segments, schedule, kind, bucket_bytes) * 1.003


def test_the_choice_is_complete_and_the_same_every_time():
    job = make_job(layers=8, micro_batches=4)
    choice = search(job)
    assert choice == search(job)
    strategy = choice.strategy
    assert len(strategy.ranges) == strategy.segments * 2 and strategy.ranges[-1][1] == 16
    layout = layout_of(job, strategy.ranges, strategy.bucket_bytes)
    for stage in range(2):
        modes = strategy.modes_of(stage, layout.buckets_of(stage, 2))
        assert len(modes) == layout.buckets_of(stage, 2)
        assert sorted(strategy.gather_order[stage]) == [n for n, mode in enumerate(modes) if mode == "early"]
    prediction = choice.prediction
    assert prediction.limit_ms <= choice.step_ms == prediction.step_ms
    table = choice.table.splitlines()
    assert table[0] == f"the planner chose {strategy.name}" and f"{strategy.segments} segments" in strategy.name
    assert f"{strategy.name} (chosen)" in table[2] and f"{choice.step_ms:.1f} ms" in table[2]
    assert len(table) == 3 + len(choice.runners_up) + 2 and "Fold3D's heuristic" in table[-3]
    assert "ms of DP.sync are hidden" in table[-2]
    assert table[-1].startswith(f"  pin it with --segments {strategy.segments} --schedule {strategy.schedule} ")
    brief = choice.brief.splitlines()
    assert brief[0] == f"{table[0]}: {choice.step_ms:.1f} ms predicted for a step" and brief[1:] == table[-2:]
    assert all(step_ms >= 0.99 * choice.step_ms for _, step_ms in choice.runners_up)


UNEVEN = ((0, 5), (5, 8), (8, 12), (12, 16))


@pytest.mark.parametrize(
    "fixed, expected",
    [
        ({"segments": 4}, {"segments": 4}),
        ({"schedule": "1f1b"}, {"segments": 1, "schedule": "1f1b"}),
        ({"schedule": "interleaved", "segments": 2}, {"schedule": "interleaved", "segments": 2}),
        ({"schedule": "fold"}, {"schedule": "fold"}),
        ({"segments": 4, "group_size": 4}, {"schedule": "fold", "group_size": 4}),
        ({"dp_sync": "zero1"}, {"dp_sync": "zero1", "gather_order": ()}),
        ({"dp_sync": "early"}, {"dp_sync": "early"}),
        ({"dp_sync": "serial", "segments": 2}, {"dp_sync": "serial", "gather_order": ()}),
        ({"bucket_bytes": 1 << 20}, {"bucket_bytes": 1 << 20}),
        ({"ranges": UNEVEN}, {"segments": 2, "ranges": UNEVEN}),
    ],
)  # fmt: skip
def test_what_is_fixed_stays(fixed, expected):
    choice = search(make_job(layers=8, micro_batches=4), Constraints(**fixed)).strategy
    assert {name: getattr(choice, name) for name in expected} == expected


def test_evaluate_takes_defaults():
    job = make_job(layers=8, micro_batches=4)
    plain = evaluate(job, Constraints())
    assert (plain.strategy.segments, plain.strategy.schedule) == (1, "1f1b")
    folded = evaluate(job, Constraints(segments=4, dp_sync="early", bucket_bytes=0))
    found = folded.strategy
    assert (found.segments, found.schedule, found.dp_sync) == (4, "aiao", "early")
    assert len(found.gather_order[0]) == 8
    assert evaluate(job, Constraints(segments=2, group_size=2)).strategy.schedule == "fold"
    assert search(job).step_ms <= min(plain.step_ms, folded.step_ms)


def test_one_replica_and_one_stage():
    alone = search(make_job(dp=1, layers=8, micro_batches=4))
    assert alone.strategy.dp_sync == "early" and alone.prediction.ranks[0].dp_bytes == 0
    flat = search(make_job(pp=1, layers=8, micro_batches=4))
    assert flat.step_ms < evaluate(make_job(pp=1, layers=8, micro_batches=4), Constraints(dp_sync="serial")).step_ms


def test_memory_decides_between_early_and_zero1():
    free = search(make_job(layers=8, micro_batches=4), Constraints(dp_sync="early", segments=4))
    job = make_job(layers=8, micro_batches=4, memory_limit=free.memory_bytes - 1)
    within = search(job, Constraints(segments=4))
    assert within.memory_bytes < free.memory_bytes and within.strategy.dp_sync in ("mixed", "zero1")
    most = search(make_job(layers=8, micro_batches=4, memory_limit=1))
    assert "nothing that was tried fits into 1 B (setting memory_limit)" in most.table
    assert most.memory_bytes <= within.memory_bytes


def test_memory_adds_up():
    """One segment of 1F1B: weights, gradients and two moments of a rank, and activations of two micro-batches."""
    job = make_job(layers=8, micro_batches=4, gradient_bytes=8_000_000)
    plain = evaluate(job, Constraints(dp_sync="early", schedule="1f1b"))
    assert plain.memory_bytes == 4 * 8_000_000 + 2 * 8 * 8192 + 8192  # and a gradient on its way
    sharded = evaluate(job, Constraints(dp_sync="zero1", schedule="1f1b"))
    assert sharded.memory_bytes == 3 * 8_000_000 + 2 * 8 * 8192 + 8192


def test_recheck_answers_only_to_drift():
    job = make_job(layers=8, micro_batches=8)
    proposal = search(job)
    choice = proposal.strategy
    layout = layout_of(job, choice.ranges, choice.bucket_bytes)
    forward, backward = ([1e3 * s for s in times] for times in (layout.forward, layout.backward))
    assert recheck(job, choice, forward, backward) is None
    bad = evaluate(
        job,
        Constraints(
            ranges=choice.ranges,
            schedule="fold",
            group_size=2,
            bucket_bytes=choice.bucket_bytes,
            dp_sync=choice.dp_sync,
            modes=choice.modes or None,
        ),
    )
    assert bad.step_ms > 1.05 * proposal.step_ms
    better = recheck(job, bad.strategy, forward, backward)
    assert better is not None and better.step_ms == pytest.approx(proposal.step_ms, rel=0.02)
    assert replace(better.strategy, schedule="fold", group_size=2, gather_order=()) == replace(
        bad.strategy, gather_order=()
    )
    slow = recheck(job, bad.strategy, [2 * ms for ms in forward], [2 * ms for ms in backward])
    assert slow is None or slow.prediction.ranks[0].compute_ms > 1.9 * better.prediction.ranks[0].compute_ms
    delayed = replace(job.network, toll=0.5 / job.network.dp_bandwidth)
    for busy in (replace(job, action_seconds=1e-3), replace(job, network=delayed)):  # is part of what was measured
        again = recheck(busy, bad.strategy, forward, backward)
        assert again is not None and again.step_ms == better.step_ms
    with pytest.raises(ConfigError, match="one each"):
        recheck(job, choice, forward[1:], backward)


def test_layers_without_a_core_pay_no_toll():
    job = make_job(layers=8, micro_batches=8)
    tolled = replace(job, network=replace(job.network, toll=0.5 / job.network.dp_bandwidth))
    idle = replace(tolled, profile=replace(tolled.profile, busy=0.0))
    assert search(idle).step_ms == search(job).step_ms < search(tolled).step_ms


def test_bad_settings():
    with pytest.raises(ConfigError, match="zero1, early, serial"):
        search(make_job(layers=4), Constraints(dp_sync="lazy"))
    with pytest.raises(ConfigError, match="group_size=2 has no effect on schedule='aiao'"):
        search(make_job(layers=4), Constraints(schedule="aiao", group_size=2))
    job = make_job(layers=4, micro_batches=4)
    with pytest.raises(ConfigError, match="lower segments"):
        search(job, Constraints(segments=5))
    with pytest.raises(ConfigError, match="segments=2 has no effect"):
        search(job, Constraints(segments=2, schedule="1f1b"))


def test_the_flags_pin_the_choice():
    """With them nothing is left to choose, and what was chosen is used."""
    for dp in (1, 2):
        job = make_job(dp=dp, layers=8, micro_batches=4)
        choice = search(job, Constraints(dp_sync="early" if dp > 1 else None))
        words = choice.flags.split(" (")[0].split()
        flags = dict(zip(words[::2], words[1::2], strict=True))
        assert set(flags) >= {"--segments", "--schedule"} | ({"--dp_sync", "--bucket_bytes"} if dp > 1 else set())
        config = ParallelConfig(
            dp=dp,
            pp=2,
            micro_batches=4,
            **{k.removeprefix("--"): int(v) if v.isdecimal() else v for k, v in flags.items()},
        )
        config.resolve_dp(2 * dp)
        constraints = resolve_auto(config, dp)
        assert not needs_planner(config, constraints, dp, limited=False)
        pinned = unplanned(config, constraints, dp, choice.strategy.ranges)
        kept = {} if dp > 1 else {"bucket_bytes": choice.strategy.bucket_bytes}
        assert replace(pinned, gather_order=choice.strategy.gather_order, **kept) == choice.strategy


def test_the_flags_with_a_memory_limit():
    """Where everything is pinned the limit would have no effect, which is an error; of a mixture it is the reason."""
    free = search(make_job(layers=8, micro_batches=4), Constraints(dp_sync="early"))
    roomy = search(
        make_job(layers=8, micro_batches=4, memory_limit=2 * free.memory_bytes), Constraints(dp_sync="early")
    )
    assert "and without memory_limit" in roomy.flags and "needs about" in roomy.table
    tight = search(make_job(layers=8, micro_batches=4, memory_limit=free.memory_bytes - 1), Constraints(segments=4))
    if tight.strategy.dp_sync == "mixed":
        assert "--dp_sync" not in tight.flags and "dp_sync stays auto" in tight.flags
