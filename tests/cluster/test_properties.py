"""What holds for every policy on every instance (dissertation 5.4.4), on random ones."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from fold3d.cluster.jobs import Allocation, Cluster, Job, Kind, Option, average_rate, isolated_rates
from fold3d.cluster.policies import POLICIES, Policy, allocate
from fold3d.cluster.policies.fair import Group

optimize = pytest.importorskip("scipy.optimize", reason="policies need fold3d[cluster]")

INSTANCES = 300
SEEDS = [pytest.param(seed, marks=[pytest.mark.full] if seed >= 24 else []) for seed in range(INSTANCES)]
GROUPS = {"a": Group(2.0, "fifo"), "b": Group(1.0)}


def instance(seed: int, *, kinds: int | None = None) -> tuple[list[Job], Cluster]:
    """Returns up to 12 jobs on up to 3 kinds of GPU; some on several GPUs, some not everywhere, some equal."""
    chance = random.Random(seed)
    names = "xyz"[: kinds or chance.randint(1, 3)]
    cluster = Cluster(tuple(Kind(name, chance.randint(4, 9), chance.uniform(0.5, 4.0)) for name in names))
    jobs: list[Job] = []
    for number in range(chance.randint(1, 12)):
        if jobs and chance.random() < 0.3:
            options = chance.choice(jobs).options
        else:
            gpus = [1] if chance.random() < 0.6 else [2, 4]
            rates = {name: chance.choice([0.0, *[chance.uniform(1, 10)] * 5]) for name in names}
            if not any(rates.values()):
                rates[names[0]] = 1.0
            options = tuple(Option(n, g, rate * g**0.9) for n, rate in rates.items() for g in gpus)
        jobs.append(
            Job(
                name=f"job{number}",
                options=options,
                weight=chance.choice([1.0, 1.0, 2.5]),
                group=chance.choice("ab"),
                arrived=float(number),
                work=chance.uniform(1e3, 1e5),
            )
        )
    return jobs, cluster


def policy_of(name: str, *, blind: bool = False) -> Policy:
    return Policy(name=name, blind=blind, groups=GROUPS if name == "hierarchical" else {})


def levels(allocation: Allocation, jobs: list[Job], cluster: Cluster) -> np.ndarray:
    rates = allocation.rates()
    return np.array([rates.get(job.name, 0.0) / average_rate(job, cluster) for job in jobs])


def objective(name: str, rates: np.ndarray, jobs: list[Job], cluster: Cluster) -> float:
    """Returns what the policy makes as large as it can."""
    work = np.array([job.work for job in jobs])
    weight = np.array([job.weight for job in jobs])
    norm = np.array([average_rate(job, cluster) for job in jobs])
    if name == "fair":
        return float((rates / norm / weight).min())
    if name == "makespan":
        return float((rates / work).min())
    if name == "finish_time":
        return float((rates / np.array(isolated_rates(jobs, cluster))).min())
    if name == "throughput":
        return float((rates / norm).sum())
    raise AssertionError(name)


def rates_of(allocation: Allocation, jobs: list[Job]) -> np.ndarray:
    return np.array([allocation.rates().get(job.name, 0.0) for job in jobs])


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_gets_more_time_than_there_is(seed: int) -> None:
    jobs, cluster = instance(seed)
    for name in POLICIES:
        for blind in (False, True) if name != "cost" else (False,):
            made = allocate(policy_of(name, blind=blind), jobs, cluster)
            for kind in cluster.kinds:
                assert made.gpus().get(kind.name, 0.0) <= kind.gpus * (1 + 1e-6), (name, kind)
            for job in jobs:
                mine = [share for share in made.shares if job.name in share.place.jobs]
                assert sum(share.time for share in mine) <= 1 + 1e-6, (name, job)
                places = {(option.kind, option.gpus): option.rate for option in job.options}
                assert all((places[s.place.kind, s.place.gpus],) == s.rates for s in mine)


@pytest.mark.parametrize("seed", SEEDS)
def test_sharing_is_no_worse_than_a_part_for_oneself(seed: int) -> None:
    """By the policy's own measure; the policy that knows of kinds is no worse than the one that does not, either."""
    jobs, cluster = instance(seed)
    equal = np.array(isolated_rates([replace(job, weight=1.0) for job in jobs], cluster))
    for name in ("fair", "makespan", "finish_time", "throughput"):
        # An equal part is possible only for jobs that run everywhere, on any number of GPUs: on one.
        if all(option.gpus == 1 and option.rate > 0 for job in jobs for option in job.options):
            aware = objective(name, rates_of(allocate(policy_of(name), jobs, cluster), jobs), jobs, cluster)
            assert aware >= objective(name, equal, jobs, cluster) * (1 - 1e-5), name
        aware = objective(name, rates_of(allocate(policy_of(name), jobs, cluster), jobs), jobs, cluster)
        blind = objective(name, rates_of(allocate(policy_of(name, blind=True), jobs, cluster), jobs), jobs, cluster)
        assert aware >= blind * (1 - 1e-5), name


@pytest.mark.parametrize("seed", SEEDS)
def test_with_one_kind_of_gpu_there_is_nothing_to_be_blind_to(seed: int) -> None:
    jobs, cluster = instance(seed, kinds=1)
    for name in ("fair", "hierarchical", "finish_time", "makespan", "throughput"):
        aware = levels(allocate(policy_of(name), jobs, cluster), jobs, cluster)
        blind = levels(allocate(policy_of(name, blind=True), jobs, cluster), jobs, cluster)
        if name in ("fair", "hierarchical"):  # of these the throughputs are unique, not only the objective
            np.testing.assert_allclose(aware, blind, rtol=1e-4, atol=1e-6)
        else:
            assert aware.sum() == pytest.approx(blind.sum(), rel=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_units_and_order_do_not_matter(seed: int) -> None:
    """Steps or tokens, one job's name before another's, one kind before another: everybody gets the same."""
    chance = random.Random(seed)
    jobs, cluster = instance(seed)
    factor = {job.name: 10.0 ** chance.randint(-3, 5) for job in jobs}
    other = [
        replace(
            job,
            work=job.work * factor[job.name],
            options=tuple(replace(option, rate=option.rate * factor[job.name]) for option in job.options),
        )
        for job in jobs
    ]
    shuffled = Cluster(tuple(reversed(cluster.kinds)))
    chance.shuffle(other)
    for name in ("fair", "hierarchical"):
        mine = dict(
            zip(
                [job.name for job in jobs], levels(allocate(policy_of(name), jobs, cluster), jobs, cluster), strict=True
            )
        )
        theirs = levels(allocate(policy_of(name), other, shuffled), other, shuffled)
        np.testing.assert_allclose(theirs, [mine[job.name] for job in other], rtol=2e-4, atol=1e-6, err_msg=name)
    for name in ("makespan", "finish_time", "throughput"):
        mine = objective(name, rates_of(allocate(policy_of(name), jobs, cluster), jobs), jobs, cluster)
        theirs = objective(name, rates_of(allocate(policy_of(name), other, shuffled), other), other, shuffled)
        assert mine == pytest.approx(theirs, rel=1e-4), name


@pytest.mark.parametrize("seed", SEEDS)
def test_after_water_filling_nobody_can_have_more_unless_another_has_less(seed: int) -> None:
    """Of the sum of all throughputs, where nobody has less, another program finds no more."""
    jobs, cluster = instance(seed)
    got = levels(allocate(policy_of("fair"), jobs, cluster), jobs, cluster)
    columns = [(m, option) for m, job in enumerate(jobs) for option in job.options if option.rate > 0]
    norm = [average_rate(job, cluster) for job in jobs]
    gain = np.array([option.rate / norm[m] for m, option in columns])
    rows = [[float(m == number) for m, _ in columns] for number in range(len(jobs))]
    rows += [[option.gpus * (option.kind == kind.name) for _, option in columns] for kind in cluster.kinds]
    rows += [[-gain[k] * (m == number) for k, (m, _) in enumerate(columns)] for number in range(len(jobs))]
    ends = [1.0] * len(jobs) + [float(kind.gpus) for kind in cluster.kinds] + list(-got * (1 - 1e-7))
    best = optimize.linprog(-gain, A_ub=np.array(rows), b_ub=np.array(ends), method="highs")
    assert -best.fun == pytest.approx(got.sum(), rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_equal_jobs_are_put_together_without_a_loss(seed: int) -> None:
    """Rates that differ by less than matters keep each job for itself; the objective is the same."""
    jobs, cluster = instance(seed)
    jobs = [replace(job, weight=1.0) for job in jobs] + [replace(job, name=f"{job.name}'", weight=1.0) for job in jobs]
    apart = [
        replace(
            job,
            options=tuple(
                replace(one, rate=one.rate * (1 + 1e-8 * k * (place + 1))) for place, one in enumerate(job.options)
            ),
        )
        for k, job in enumerate(jobs)
    ]
    together = np.sort(levels(allocate(policy_of("fair"), jobs, cluster), jobs, cluster))
    np.testing.assert_allclose(
        np.sort(levels(allocate(policy_of("fair"), apart, cluster), apart, cluster)), together, rtol=1e-3, atol=1e-6
    )
