"""Ada-Grouper: the replanner on links that change; the simulator makes the steps in the place of measured ones."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fold3d
from fold3d import schedule as schedules
from fold3d.engine.planning import replanner as replanner_module
from fold3d.engine.planning.replanner import Replanner
from fold3d.observe.link_times import LinkTimes, rates_of
from fold3d.plan.costs import LayerBytes
from fold3d.plan.job import TrainingJob
from fold3d.plan.layout import Plan, simulate
from fold3d.plan.micro_batch_size import Grouped, in_parts, memory_curve, undominated
from fold3d.plan.search import search
from fold3d.plan.strategy import Constraints, Strategy
from fold3d.topology import Topology
from tests.plan.jobs import make_job

PP, BORDERS = 4, 3
SAMPLES, MICRO_BATCHES = 4, 8
RATE = 1e8
ACTIVATION = 250_000
"""Bytes of four samples: on a slow link they take 1.6 times as long as the forward of a stage."""
SLOWER = 13
FIXED = Constraints(segments=1, dp_sync="early")


def job_of(memory_limit: int | None = None) -> TrainingJob:
    """Eight micro-batches of four samples on four stages; of one sample a layer takes half as long as of all."""
    kept = 1_000_000
    job = make_job(
        dp=1,
        pp=PP,
        layers=4,
        micro_batches=MICRO_BATCHES,
        forward=0.16,
        backward=0.32,
        gradient_bytes=1_000_000,
        activation_bytes=ACTIVATION,
        bandwidth=RATE,
        memory_limit=memory_limit,
        action_seconds=0.0,
    )

    def of_samples(samples: int, share: float) -> Any:
        nothing = LayerBytes(saved=0, outputs=0, forward=0, backward=0)
        size = kept * samples // SAMPLES
        layer = LayerBytes(saved=size, outputs=0, forward=size, backward=size)
        return replace(
            job.profile,
            forward=tuple(share * seconds for seconds in job.profile.forward),
            backward=tuple(share * seconds for seconds in job.profile.backward),
            layers=(nothing, *(layer,) * 16, nothing),
            activation_bytes=(ACTIVATION * samples // SAMPLES,) * 16,
        )

    return replace(job, samples=SAMPLES, profile=of_samples(SAMPLES, 1.0), one_sample=of_samples(1, 0.5))


def with_links(job: TrainingJob, rates: tuple[float, ...]) -> TrainingJob:
    return replace(job, links=(rates, rates))


class World:
    """What the ranks ask each other: rank 0 hears all, and the others what it has found."""

    def __init__(self) -> None:
        self.others: list[Replanner] = []
        self.found: list[Any] = []

    def decide(self, value: Any, verdict: Any) -> Any:
        shares = [one._share(None, True) if isinstance(value, dict) else one._drifts for one in self.others]
        self.found.append(verdict([value, *shares]))
        return self.found[-1]


class Training:
    """A pipeline whose steps are simulated, and its ranks' replanners."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, job: TrainingJob, *, resizes: bool = False, **settings: Any
    ) -> None:
        self.job = job
        self.said: list[str] = []
        monkeypatch.setattr(replanner_module, "announce", lambda _, text: self.said.append(text))
        proposal = search(in_parts(job, SAMPLES), FIXED)
        if resizes:
            sized = {size: search(in_parts(job, size), FIXED) for size in memory_curve(job, proposal.strategy)}
            fit = {
                n: one for n, one in sized.items() if job.memory_limit is None or one.memory_bytes <= job.memory_limit
            }
            size = min(fit, key=lambda n: fit[n].step_ms)
            proposal = replace(fit[size], micro_batch_size=size)
        self.strategy: Strategy = proposal.strategy
        self.world = World()
        config = fold3d.ParallelConfig(pp=PP, micro_batches=MICRO_BATCHES, segments=1, **settings)

        def replanner(stage: int) -> Replanner:
            world: Any = self.world if stage == 0 else SimpleNamespace(decide=lambda *_: self.world.found[self._told()])
            groups: Any = SimpleNamespace(world=world)
            topology = Topology(dp=1, pp=PP, rank=stage)
            return Replanner(topology, groups, config, torch.device("cpu"), (job, proposal), resizes=resizes)

        self.next = 0
        self.ranks = [replanner(stage) for stage in range(PP)]
        self.world.others = self.ranks[1:]
        self.looks = 0

    def _told(self) -> int:
        self.next += 1
        return self.next - 1

    @property
    def size(self) -> int:
        assert self.ranks[0].size is not None
        return self.ranks[0].size

    def length(self, rates: tuple[float, ...]) -> float:
        """Milliseconds of a step as it is run now."""
        return simulate(with_links(in_parts(self.job, self.size), rates), Plan.of(self.strategy))[0].step_ns / 1e6

    def step(self, rates: tuple[float, ...], noise: float = 1.0) -> float:
        """Looks where it is time, then runs a step; returns its milliseconds."""
        if self.ranks[0].is_due:
            assert all(rank.is_due for rank in self.ranks)
            schedule = schedules.generate(
                self.strategy.schedule,
                pp=PP,
                segments=1,
                micro_batches=self.strategy.micro_batches,
                group_size=self.strategy.group_size,
            )
            self.world.found.clear()
            found = [self.ranks[0].look(self.strategy, schedule, None, divides=True)]
            self.looks += len(self.world.found) > 1
            for rank in self.ranks[1:]:
                self.next = 0
                found.append(rank.look(self.strategy, schedule, None, divides=True))
            assert all(one == found[0] for one in found)
            assert len({rank.size for rank in self.ranks}) == 1
            self.strategy = found[0] or self.strategy
        step = simulate(with_links(in_parts(self.job, self.size), rates), Plan.of(self.strategy))[0]
        for stage, rank in enumerate(self.ranks):
            records = [
                (str(span.lane), span.text, span.start_ns, span.end_ns, span.bytes)
                for span in step.spans
                if span.rank == stage
            ]
            rank.observe(records, noise * step.step_ns / 1e6)
        return noise * step.step_ns / 1e6


def best_ms(job: TrainingJob, strategy: Strategy, rates: tuple[float, ...], sizes: tuple[int, ...]) -> float:
    """The shortest step of all plans with the same cut."""
    fixed = replace(Constraints.of(strategy, keeps_order=False), bucket_bytes=strategy.bucket_bytes)
    found = [search(with_links(in_parts(job, size), rates), fixed) for size in sizes]
    limit = job.memory_limit
    return min(one.step_ms for one in found if limit is None or one.memory_bytes <= limit)


FAST = (RATE,) * BORDERS
SLOW = (RATE / SLOWER,) * BORDERS
ONE_SLOW = (RATE, RATE / SLOWER, RATE)


@pytest.mark.parametrize("slow", [SLOW, ONE_SLOW])
@pytest.mark.parametrize(("limit", "resizes"), [(None, False), (30_000_000, True), (21_500_000, True)])
def test_within_25_steps_it_is_where_a_plan_made_on_that_link_would_be(monkeypatch, limit, resizes, slow) -> None:
    training = Training(monkeypatch, job_of(limit), resizes=resizes)
    sizes = (1, 2, 4) if resizes else (SAMPLES,)
    first, size = training.strategy, training.size
    for number in range(1, 91):
        rates = slow if 14 <= number < 60 else FAST
        training.step(rates)
        if number in (13, 39, 59, 85, 90):
            best = best_ms(training.job, first, rates, sizes)
            assert training.length(rates) <= 1.05 * best, (number, str(training.strategy), training.size)
    assert all("changed its mind at step" in text and "\n" not in text for text in training.said)
    stayed = simulate(with_links(in_parts(training.job, size), slow), Plan.of(first))[0].step_ns / 1e6
    if slow == SLOW:
        assert best_ms(training.job, first, slow, sizes) < 0.95 * stayed, "else there was nothing to be had"
        assert len(training.said) >= 2, "there, and back again"


def test_a_steady_link_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    training, numbers = Training(monkeypatch, job_of()), random.Random(3)
    training.step(FAST)
    first = (training.strategy.schedule, training.strategy.group_size)
    for _ in range(200):
        training.step(FAST, numbers.uniform(0.97, 1.04))
        assert (training.strategy.schedule, training.strategy.group_size) == first
    assert not training.said and training.looks <= 8


def test_messages_that_are_slow_at_random_gain_by_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of them takes 20 times as long."""
    training, numbers = Training(monkeypatch, job_of()), random.Random(5)
    plain = replace(training.strategy, schedule="1f1b", group_size=None, gather_order=())
    spent = stayed = 0.0
    for number in range(60):
        slow = [sum(numbers.random() < 0.2 for _ in range(MICRO_BATCHES)) / MICRO_BATCHES for _ in range(BORDERS)]
        rates = tuple(RATE / (1 + 19 * share) for share in slow)
        took = training.step(rates)
        if number >= 25:
            spent += took
            stayed += simulate(with_links(training.job, rates), Plan.of(plain))[0].step_ns / 1e6
    assert spent <= 1.001 * stayed


def test_what_is_pinned_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch, job_of(), retune=False)
    first = training.strategy
    for number in range(1, 60):
        training.step(SLOW if number >= 14 else FAST)
    assert training.strategy == first and not training.said


def test_candidates_lie_on_the_memory_curve() -> None:
    points = [Grouped(size, 48 // (4 * size)) for size in (12, 6, 5, 4, 3, 2, 1)]  # a sample keeps 4 of 48
    kept = [(one.group_size, one.size) for one in undominated(points)]
    assert kept == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    job = job_of()
    strategy = search(job, FIXED).strategy
    assert memory_curve(job, strategy) == [4, 2, 1]

    def needs(size: int, group_size: int) -> int:
        plan = replace(Plan.of(strategy), schedule="kfkb", group_size=group_size)
        return max(curve.peak.device for curve in simulate(in_parts(job, size), plan)[1])

    for limit, expected in (((4, 1), [4, 2, 1]), ((2, 1), [2, 1]), ((1, 1), [1])):
        sizes = memory_curve(replace(job, memory_limit=needs(*limit)), strategy)
        assert sizes == expected, limit


def test_links_are_of_the_last_steps() -> None:
    times = LinkTimes(2)
    times.observe(
        [("send_f", "0SEND_F0", 0, 10, 100), ("recv_b", "0RECV_B0", 20, 40, 100), ("compute", "0F0", 0, 5, 0)]
    )
    times.observe([("send_f", "0SEND_F0", 0, 30, 100)])
    assert times.traffic() == {(0, True): (200, 40e-9, False), (0, False): (100, 20e-9, True)}
    times.observe([("recv_f", "1RECV_F0", 0, 5, 100)])
    times.observe([("recv_f", "1RECV_F0", 0, 5, 100)])
    assert times.traffic() == {(0, True): (200, 10e-9, True)}
    shares = [{(0, True): (100, 1.0, False)}, {(0, True): (100, 2.0, True)}, {(0, True): (100, 4.0, True)}]
    assert rates_of(shares, 2, 7.0) == ((25.0, 7.0), (7.0, 7.0))
