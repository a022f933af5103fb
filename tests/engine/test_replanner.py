"""Replanner: when it looks, and that a step is predicted from what the links do now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fold3d
from fold3d import schedule as schedules
from fold3d.data_parallel.bucket_schedule import BucketSchedule
from fold3d.engine.planning import replanner as replanner_module
from fold3d.engine.planning.replanner import EVERY, FIRST_STEPS, RECENT, SAMPLE, Replanner
from fold3d.plan.costs import NetworkCosts
from fold3d.plan.strategy import Strategy
from fold3d.topology import Submesh, Topology

MICRO_BATCHES = 2
MS = 1_000_000
BUCKET = 1_000_000  # bytes: 10 ms for each half of its sum at 50 MB/s
RATE = 5e7


STRATEGY = Strategy(dp=2, pp=1, micro_batches=MICRO_BATCHES, ranges=((0, 1),), schedule="1f1b", dp_sync="early")


class Sync:
    """What the replanner asks of DP.sync; one chunk in four buckets on links of a rate that the test sets."""

    def __init__(self) -> None:
        specs = [SimpleNamespace(chunk=0, planned=number, summed_over=Submesh(pp=(0,))) for number in range(4)]
        gradients = SimpleNamespace(nbytes=BUCKET)
        self.buckets: list[Any] = [SimpleNamespace(spec=spec, gradients=gradients) for spec in specs]
        self.plan = BucketSchedule.make(specs, STRATEGY, stage=0)  # type: ignore[arg-type]
        self.rate = self.sustained = RATE
        self.by_library = False

    def bandwidth(self, *, sustained: bool = False) -> float:
        return min(self.rate, self.sustained) if sustained else self.rate

    def settle(self) -> None:
        pass

    def reschedule(self, gather_order: Any) -> None:
        self.plan = self.plan.in_order(gather_order)


LINKS = NetworkCosts(pp_latency=1e-4, pp_bandwidth=RATE, dp_bandwidth=RATE, hop_latency=1e-4)


def make_tuner(monkeypatch: pytest.MonkeyPatch, planned: Any = None, has_times: bool = True) -> Replanner:
    monkeypatch.setattr(replanner_module, "probe_network", lambda *_, **__: LINKS)
    topology = Topology(dp=2, pp=1, rank=0)
    config = fold3d.ParallelConfig(dp=2, segments=1, micro_batches=MICRO_BATCHES)
    alone = SimpleNamespace(decide=lambda value, verdict: verdict([value]))
    groups: Any = SimpleNamespace(world=alone)
    return Replanner(topology, groups, config, torch.device("cpu"), planned, has_times=has_times)


def observe(
    replanner: Replanner,
    steps: int,
    step_ms: float,
    other_ms: float = 0.0,
    *,
    backward: Sequence[str] = ("B",),
    slower: int = 1,
) -> None:
    """Every step computes 10 ms forward and 20 ms backward for each micro-batch, and waits but for `other_ms`.

    Args:
        backward: the actions that share the time of a backward.
        slower: computing takes so many times as long.
    """
    records: list[Any] = []
    forward, part = 10 * MS * slower, 20 * MS * slower // len(backward)
    for micro_batch in range(MICRO_BATCHES):
        start = 30 * MS * slower * micro_batch
        records += [
            ("compute", f"0F{micro_batch}", start, start + forward, 0),
            *(
                ("compute", f"0{kind}{micro_batch}", start + forward + k * part, start + forward + (k + 1) * part, 0)
                for k, kind in enumerate(backward)
            ),
        ]
    computed = 30 * MS * slower * MICRO_BATCHES
    records.append(("wait", "0REDUCE_GRAD", computed, max(computed, round((step_ms - other_ms) * MS)), 0))
    for _ in range(steps):
        replanner.observe(records, step_ms)


def first_look(replanner: Replanner, sync: Sync) -> float:
    """Returns the first prediction, in milliseconds."""
    schedule = schedules.generate("1f1b", pp=1, segments=1, micro_batches=MICRO_BATCHES)
    observe(replanner, FIRST_STEPS, 100.0)
    assert replanner.is_due
    found = replanner.look(STRATEGY, schedule, sync)  # type: ignore[arg-type]
    assert found is not None and found == replace(STRATEGY, gather_order=found.gather_order)
    assert sorted(found.gather_order[0]) == [0, 1, 2, 3]
    assert replanner.expected is not None
    return replanner.expected.step_ms


def look_again(replanner: Replanner, sync: Sync, step_ms: float) -> float:
    schedule = schedules.generate("1f1b", pp=1, segments=1, micro_batches=MICRO_BATCHES)
    for _ in range(EVERY):
        assert not replanner.is_due
        observe(replanner, 1, step_ms)
        if replanner.is_due:
            replanner.look(STRATEGY, schedule, sync)  # type: ignore[arg-type]
        if replanner._since == 0:  # the ranks did not only ask each other
            break
    assert replanner._since == 0 and replanner.expected is not None
    return replanner.expected.step_ms


def test_the_first_look_waits_for_measured_steps(monkeypatch) -> None:
    replanner = make_tuner(monkeypatch)
    observe(replanner, FIRST_STEPS - 1, 100.0)
    assert not replanner.is_due and replanner.expected is None
    assert 60.0 < first_look(make_tuner(monkeypatch), Sync()) < 60.0 + 8 * 10 + 10


def test_gathers_are_planned_at_the_speed_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = Sync()
    at_best = first_look(make_tuner(monkeypatch), sync)
    sync.sustained = RATE / 2
    assert first_look(make_tuner(monkeypatch), sync) > 1.1 * at_best


def test_launches_are_not_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    replanner = make_tuner(monkeypatch, has_times=False)
    observe(replanner, 20, 130.0)
    assert not replanner.is_due and replanner.believed is None


def test_a_split_backward_takes_what_both_halves_take(monkeypatch) -> None:
    whole, split = make_tuner(monkeypatch), make_tuner(monkeypatch)
    observe(whole, FIRST_STEPS, 100.0)
    observe(split, FIRST_STEPS, 100.0, backward="IW")
    assert split._times == whole._times == {(0, "F"): [0.01] * 4, (0, "B"): [0.02] * 4}


def test_as_long_as_steps_take_what_was_predicted_nothing_is_planned(monkeypatch) -> None:
    replanner, sync = make_tuner(monkeypatch), Sync()
    predicted = first_look(replanner, sync)
    before, plan = replanner.expected, sync.plan
    sync.rate = RATE / 4
    assert look_again(replanner, sync, 1.05 * predicted) == predicted
    assert replanner.expected is before and sync.plan is plan


def test_links_that_became_slower_are_noticed(monkeypatch) -> None:
    replanner, sync = make_tuner(monkeypatch), Sync()
    predicted = first_look(replanner, sync)
    sync.rate = RATE / 4
    later = look_again(replanner, sync, 3 * predicted)
    assert later > 2 * predicted, "the speed of before training does not count any more"
    sync.rate = RATE
    assert look_again(replanner, sync, predicted) == pytest.approx(predicted, rel=0.01)


def test_one_slow_ring_is_enough(monkeypatch) -> None:
    replanner, schedule = (
        make_tuner(monkeypatch),
        schedules.generate("1f1b", pp=1, segments=1, micro_batches=MICRO_BATCHES),
    )
    replanner._links = (RATE, 1e-4, 1e-4)
    observe(replanner, FIRST_STEPS, 100.0)
    share = replanner._share(Sync())  # type: ignore[arg-type]
    found = replanner._expect(STRATEGY, schedule, [share, share])
    assert found is not None
    replanner.expected = found[0]
    slow = share | {"bandwidth": RATE / 4, "step_ms": 3 * replanner.expected.step_ms}
    later = replanner._expect(STRATEGY, schedule, [share, slow])
    assert later is not None and later[0].step_ms > 2 * replanner.expected.step_ms
    hardly = share | {"bandwidth": 0.9 * RATE, "step_ms": 3 * replanner.expected.step_ms}
    same = replanner._expect(STRATEGY, schedule, [share, hardly])
    assert same is not None and same[0].step_ms == replanner.expected.step_ms


def test_of_a_library_s_collectives_the_replica_counts_that_waited_least(monkeypatch) -> None:
    """They move at one speed, and whoever is early for one measures less."""
    replanner, sync = make_tuner(monkeypatch), Sync()
    sync.by_library = True
    schedule = schedules.generate("1f1b", pp=1, segments=1, micro_batches=MICRO_BATCHES)
    replanner._links = (RATE, 1e-4, 1e-4)
    observe(replanner, FIRST_STEPS, 100.0)
    share = replanner._share(sync)  # type: ignore[arg-type]
    found = replanner._expect(STRATEGY, schedule, [share, share])
    assert found is not None
    replanner.expected, before = found[0], found[0].step_ms
    late = share | {"step_ms": 3 * before}
    early = late | {"bandwidth": RATE / 4}
    same = replanner._expect(STRATEGY, schedule, [late, early])
    assert same is not None and same[0].step_ms == before
    slower = replanner._expect(STRATEGY, schedule, [early, early])
    assert slower is not None and slower[0].step_ms > 2 * before


def test_the_search_for_a_schedule_hears_of_slower_links_only(monkeypatch) -> None:
    heard: list[float] = []
    monkeypatch.setattr(replanner_module, "recheck", lambda job, *_: heard.append(job.network.dp_bandwidth))

    @dataclass(frozen=True)
    class Job:
        micro_batches: int
        network: NetworkCosts
        samples: None = None
        links: None = None

    said = SimpleNamespace(micro_batch_size=None)
    replanner, sync = make_tuner(monkeypatch, (Job(MICRO_BATCHES, LINKS), said)), Sync()
    predicted = first_look(replanner, sync)
    look_again(replanner, sync, 2 * predicted)
    sync.rate = RATE / 2
    look_again(replanner, sync, 3 * predicted)
    assert heard == [RATE, RATE, RATE / 2]


def test_of_the_steps_between_looks_some_are_looked_into(monkeypatch) -> None:
    replanner, sync = make_tuner(monkeypatch), Sync()
    first_look(replanner, sync)
    observe(replanner, EVERY, 100.0)
    assert {len(times) for times in replanner._times.values()} == {EVERY // SAMPLE * MICRO_BATCHES}


def test_steps_that_drift_are_looked_at_within_as_many_as_are_compared(monkeypatch) -> None:
    replanner, sync = make_tuner(monkeypatch), Sync()
    predicted = first_look(replanner, sync)
    look_again(replanner, sync, predicted)
    before = replanner._steps
    look_again(replanner, sync, 1.5 * predicted)
    assert replanner._steps - before == RECENT


def test_steps_that_drift_are_predicted_by_their_own_times(monkeypatch) -> None:
    """The look that noticed them took the times of before, and the next one came many steps later."""
    replanner, sync = make_tuner(monkeypatch), Sync()
    predicted = first_look(replanner, sync)
    look_again(replanner, sync, predicted)
    observe(replanner, RECENT, 3 * predicted, slower=3)
    replanner.look(STRATEGY, schedules.generate("1f1b", pp=1, segments=1, micro_batches=MICRO_BATCHES), sync)  # type: ignore[arg-type]
    assert replanner.expected is not None and replanner.expected.step_ms >= 3 * 30 * MICRO_BATCHES


def test_looks_become_rarer(monkeypatch) -> None:
    replanner, sync = make_tuner(monkeypatch), Sync()
    predicted = first_look(replanner, sync)
    looked = []
    for _ in range(5):
        before = replanner._steps
        look_again(replanner, sync, predicted)
        looked.append(replanner._steps - before)
    # The first ones took otherwise than at the first look, which is a drift.
    assert looked == [RECENT, 2 * SAMPLE, 4 * SAMPLE, EVERY, EVERY]


def test_what_is_not_simulated_is_part_of_the_prediction(monkeypatch) -> None:
    schedule = schedules.generate("1f1b", pp=1, segments=1, micro_batches=MICRO_BATCHES)
    predictions = []
    for other_ms in (0.0, 25.0):
        replanner = make_tuner(monkeypatch)
        observe(replanner, FIRST_STEPS, 150.0, other_ms)
        replanner.look(STRATEGY, schedule, Sync())  # type: ignore[arg-type]
        assert replanner.expected is not None
        predictions.append(replanner.expected.step_ms)
    assert predictions[1] - predictions[0] == pytest.approx(25.0)


def test_a_prediction_that_is_off_is_not_shown(monkeypatch) -> None:
    replanner, sync = make_tuner(monkeypatch), Sync()
    predicted = first_look(replanner, sync)
    observe(replanner, RECENT, predicted)
    assert replanner.believed is replanner.expected
    observe(replanner, RECENT // 2, 2 * predicted)
    assert replanner.believed is replanner.expected, "one slow step says nothing"
    observe(replanner, 1, 2 * predicted)
    assert replanner.believed is None
    observe(replanner, RECENT, 1.05 * predicted)
    assert replanner.believed is replanner.expected


def test_copies_take_what_they_took(monkeypatch) -> None:
    """Stashes whose copies take twice a forward make a step longer; with ten times the bandwidth they do not."""
    made = schedules.generate("gpipe", pp=1, segments=1, micro_batches=2 * MICRO_BATCHES)
    lowered = schedules.lower(made, reduce=True, offload=[True], prefetch_distance=1)
    strategy = replace(STRATEGY, micro_batches=2 * MICRO_BATCHES)
    expected = []
    for copy_ms in (20, 2):
        replanner = make_tuner(monkeypatch)
        copies: list[Any] = [("offload", "0OFFLOAD0", 0, copy_ms * MS, 10**6)]
        for _ in range(FIRST_STEPS):
            observe(replanner, 1, 100.0)
            replanner.observe(copies, 100.0)
        assert replanner.look(strategy, lowered, Sync()) is not None  # type: ignore[arg-type]
        assert replanner.expected is not None
        expected.append(replanner.expected)
    slow, fast = expected
    assert slow.ranks[0].exposed_offload_ms > 50 and slow.step_ms > fast.step_ms + 50
    assert fast.ranks[0].exposed_offload_ms == 0
