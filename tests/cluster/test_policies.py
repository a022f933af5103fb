"""Policies on cases that are small enough to be worked out by hand, or by trying every vertex."""

from __future__ import annotations

import builtins
import random

import numpy as np
import pytest

from fold3d.cluster.jobs import Allocation, Cluster, Job, Option, Pair, average_rate
from fold3d.cluster.policies import POLICIES, Policy, allocate
from fold3d.cluster.policies.fair import Group
from fold3d.errors import ConfigError
from tests.cluster.oracle import GAVEL, Problem, jobs_of

pytest.importorskip("scipy", reason="policies need fold3d[cluster]")

TWO = Cluster.parse("v:1@3,k:1@1")


def levels(allocation: Allocation, jobs: list[Job], cluster: Cluster) -> np.ndarray:
    """Returns throughputs in average GPUs."""
    rates = allocation.rates()
    return np.array([rates.get(job.name, 0.0) / average_rate(job, cluster) for job in jobs])


def test_the_worked_example() -> None:
    """5.4.1 of the dissertation: 8/11 of an average GPU for all three, by 5/11, 5/11 and 1/11 of the V100."""
    jobs = jobs_of(*GAVEL, kinds="vk")
    made = allocate(Policy(name="fair"), jobs, TWO)
    np.testing.assert_allclose(levels(made, jobs, TWO), [8 / 11] * 3, rtol=1e-6)
    times = {(share.place.jobs[0], share.place.kind): share.time for share in made.shares}
    expected = {("0", "v"): 5 / 11, ("1", "v"): 5 / 11, ("1", "k"): 1 / 11, ("2", "v"): 1 / 11, ("2", "k"): 10 / 11}
    assert times == {place: pytest.approx(time, abs=1e-6) for place, time in expected.items()}
    # "About 10 % higher throughput" than a third of each GPU, which is 2/3 of an average one.
    assert 1.08 < (8 / 11) / (2 / 3) < 1.1


@pytest.mark.parametrize("seed", range(8))
def test_fair_is_what_trying_every_vertex_finds(seed: int) -> None:
    """With weights, on GPUs that are scarce or plenty: all levels, not only the least."""
    chance = random.Random(seed)
    jobs = jobs_of(
        *[(chance.uniform(1, 9), chance.uniform(1, 9)) for _ in range(3)],
        kinds="vk",
        weight=tuple(chance.choice([1.0, 1.0, 3.0]) for _ in range(3)),
    )
    cluster = Cluster.parse(f"v:{chance.randint(1, 2)},k:{chance.randint(1, 2)}")
    expected = Problem(jobs, cluster).leximin(np.array([job.weight for job in jobs]))
    np.testing.assert_allclose(levels(allocate(Policy(name="fair"), jobs, cluster), jobs, cluster), expected, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_makespan_throughput_and_fifo_are_what_trying_every_vertex_finds(seed: int) -> None:
    chance = random.Random(seed)
    rates = [(chance.uniform(1, 9), chance.uniform(1, 9)) for _ in range(3)]
    work = tuple(chance.uniform(1e3, 9e3) for _ in rates)
    jobs = jobs_of(*rates, kinds="vk", work=work, arrived=(2.0, 0.0, 1.0))
    problem = Problem(jobs, TWO)
    seconds = np.array(work) / problem.norm
    for budget in (None, 1.2 * float(sum(w / r[1] for w, r in zip(work, rates, strict=True))) / 3600):
        if budget is not None and budget < min_cost(jobs):
            continue
        made = allocate(Policy(name="makespan", budget=budget), jobs, TWO)
        found = max(w / made.rates()[job.name] for w, job in zip(work, jobs, strict=True))
        expected = problem.rise(seconds, np.zeros(3), None if budget is None else budget * 3600)
        assert found == pytest.approx(1 / expected, rel=1e-5)
    made = allocate(Policy(name="throughput"), jobs, TWO)
    total = sum(problem.rate(job) for job in range(3))
    assert levels(made, jobs, TWO).sum() == pytest.approx(problem.solve(total, [], [])[0], rel=1e-6)
    made = allocate(Policy(name="fifo"), jobs, TWO)
    most = [max(row) / norm for row, norm in zip(rates, problem.norm, strict=True)]
    by_turn = sum(turn / most[job] * problem.rate(job) for job, turn in ((1, 3), (2, 2), (0, 1)))
    got = sum(levels(made, jobs, TWO)[job] * turn / most[job] for job, turn in ((1, 3), (2, 2), (0, 1)))
    assert got == pytest.approx(problem.solve(by_turn, [], [])[0], rel=1e-6)


def min_cost(jobs: list[Job]) -> float:
    """Returns what the work costs where it is cheapest."""
    prices = {kind.name: kind.price for kind in TWO.kinds}
    return sum(min(job.work / one.rate / 3600 * prices[one.kind] for one in job.options) for job in jobs)


def test_a_budget_makes_a_batch_slower_and_is_kept() -> None:
    """One job, 3600 steps: 720 s on the GPU at 3 an hour, 1800 s on that at 1; a budget between buys a mixture."""
    jobs = jobs_of((5.0, 2.0), kinds="vk", work=(3600.0,))
    for budget, expected in ((0.6, 720.0), (0.55, 1260.0), (0.5, 1800.0)):
        made = allocate(Policy(name="makespan", budget=budget), jobs, TWO)
        seconds = 3600.0 / made.rates()["0"]
        spent = sum(seconds / 3600 * share.time * {"v": 3.0, "k": 1.0}[share.place.kind] for share in made.shares)
        assert spent <= budget * (1 + 1e-6)
        assert seconds == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match=r"the budget is 0.4, but the work costs 0.5 where it is cheapest"):
        allocate(Policy(name="makespan", budget=0.4), jobs, TWO)


def test_weights_and_water_filling() -> None:
    """5.4.3: four equal jobs, one of weight 3, on four equal GPUs: all have one, whatever the first rise gives."""
    jobs = jobs_of((1.0,), (1.0,), (1.0,), (1.0,), kinds="v", weight=(3.0, 1.0, 1.0, 1.0))
    for count, expected in ((4, [1, 1, 1, 1]), (2, [1, 1 / 3, 1 / 3, 1 / 3]), (1, [1 / 2, 1 / 6, 1 / 6, 1 / 6])):
        made = allocate(Policy(name="fair"), jobs, Cluster.parse(f"v:{count}"))
        assert [made.rates()[job.name] for job in jobs] == pytest.approx(expected)


def test_groups_share_and_their_jobs_share_what_they_have() -> None:
    """Groups of weights 1 and 2 on three GPUs of a kind: fair inside, or one after the other."""
    jobs = jobs_of(
        *[(1.0,)] * 8, kinds="v", group=("a", "a", "a", "b", "b", "b", "b", "b"), arrived=(0, 1, 2, 3, 4, 5, 6, 7)
    )
    groups = {"a": Group(1.0, "fifo"), "b": Group(2.0, "fair")}
    made = allocate(Policy(name="hierarchical", groups=groups), jobs, Cluster.parse("v:3")).rates()
    assert [made.get(job.name, 0.0) for job in jobs] == pytest.approx([1, 0, 0, 0.4, 0.4, 0.4, 0.4, 0.4], abs=1e-6)
    # The first of `a` cannot use more than one: its group's weight goes on to the next, and to part of the third.
    third, others = 1 / 3, 14 / 15
    made = allocate(Policy(name="hierarchical", groups=groups), jobs, Cluster.parse("v:7")).rates()
    assert [made.get(job.name, 0.0) for job in jobs] == pytest.approx([1, 1, third, *[others] * 5], abs=1e-6)
    made = allocate(Policy(name="hierarchical", groups=groups), jobs[:5], Cluster.parse("v:2")).rates()
    assert [made.get(job.name, 0.0) for job in jobs[:5]] == pytest.approx([2 / 3, 0, 0, 2 / 3, 2 / 3], abs=1e-6)


def test_finish_time_makes_good_what_was_lost() -> None:
    """Two equal jobs on one GPU; one has waited: it gets more, so that both ratios are equal."""
    even = jobs_of((1.0,), (1.0,), kinds="v", work=(3600.0, 3600.0))
    cluster = Cluster.parse("v:1")
    assert allocate(Policy(name="finish_time"), even, cluster).rates() == pytest.approx({"0": 0.5, "1": 0.5})
    late = jobs_of((1.0,), (1.0,), kinds="v", work=(3600.0, 3600.0), elapsed=(3600.0, 0.0), isolated=(0.0, 0.0))
    rates = allocate(Policy(name="finish_time"), late, cluster).rates()
    ratios = [(job.elapsed + job.work / rates[job.name]) / (2 * job.work) for job in late]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-4) and rates["0"] + rates["1"] == pytest.approx(1.0)
    heavy = jobs_of((1.0,), (1.0,), kinds="v", work=(3600.0, 3600.0), weight=(3.0, 1.0))
    assert allocate(Policy(name="finish_time"), heavy, cluster).rates() == pytest.approx({"0": 0.75, "1": 0.25})


def test_shortest_gives_the_fastest_gpu_to_who_is_done_soonest() -> None:
    jobs = jobs_of((10.0, 9.0), (10.0, 1.0), kinds="vk", work=(100.0, 200.0))
    assert allocate(Policy(name="shortest"), jobs, TWO).rates() == pytest.approx({"0": 10.0, "1": 1.0}, rel=1e-5)
    # By turn alone the first would move: 2 x 0.9 + 1 x 1 is more than 2 x 1 + 1 x 0.1.
    assert allocate(Policy(name="fifo"), jobs, TWO).rates() == pytest.approx({"0": 9.0, "1": 10.0})


def test_cost_waits_for_the_cheap_gpu_unless_there_is_a_deadline() -> None:
    """10 a second at 3 an hour, or 4 at 1: half of the time on each makes 7 a second."""
    free = jobs_of((10.0, 4.0), (10.0, 4.0), kinds="vk", work=(7e4, 7e4))
    made = allocate(Policy(name="cost"), free, TWO)
    assert made.gpus() == pytest.approx({"k": 1.0}) and not made.late
    due = jobs_of((10.0, 4.0), kinds="vk", work=(7e4,), deadline=(1e4,))
    made = allocate(Policy(name="cost"), due, TWO)
    assert {share.place.kind: share.time for share in made.shares} == pytest.approx({"v": 0.5, "k": 0.5}, abs=1e-5)
    assert not made.late


def test_deadlines_that_cannot_all_be_met() -> None:
    """Two jobs need 0.8 of the fast GPU each; a third, on the other, is on time all the same."""
    jobs = jobs_of((10.0, 0.0), (10.0, 0.0), (0.0, 4.0), kinds="vk", work=(8e4, 8e4, 4e4), deadline=(1e4, 1e4, 1e4))
    made = allocate(Policy(name="cost"), jobs, TWO)
    assert made.late == ("0", "1")
    assert made.rates() == pytest.approx({"0": 5.0, "1": 5.0, "2": 4.0}, rel=1e-4)


def test_pairs_share_a_gpu_where_that_is_worth_it() -> None:
    """5.3.1's matrix: beside each other on the V100, jobs 0 and 1 make 20 and 7.5 steps a second."""
    jobs = jobs_of((40.0, 20.0, 10.0), (15.0, 10.0, 5.0), kinds="vpk")
    cluster = Cluster.parse("v:1")
    pair = Pair(("0", "1"), "v", 1, (20.0, 7.5))
    alone = levels(allocate(Policy(name="fair"), jobs, cluster), jobs, cluster)
    both = allocate(Policy(name="fair", pairs=(pair,)), jobs, cluster)
    np.testing.assert_allclose(levels(both, jobs, cluster), alone)
    better = allocate(Policy(name="fair", pairs=(Pair(("0", "1"), "v", 1, (30.0, 10.0)),)), jobs, cluster)
    # 12/13 of the time beside each other, and 1/13 job 1 alone: both have 9/13.
    assert {share.place.jobs: share.time for share in better.shares} == pytest.approx(
        {("0", "1"): 12 / 13, ("1",): 1 / 13}
    )
    np.testing.assert_allclose(levels(better, jobs, cluster), [9 / 13] * 2, rtol=1e-6)


def test_jobs_on_several_gpus_count_them() -> None:
    """A job on four GPUs and four jobs on one, on four GPUs: GPUs count."""
    big = Job(name="big", options=(Option("v", 4, 4.0),))
    small = [Job(name=f"small{k}", options=(Option("v", 1, 1.0),)) for k in range(4)]
    made = allocate(Policy(name="fair"), [big, *small], Cluster.parse("v:4"))
    assert made.rates()["big"] == pytest.approx(0.8)  # of one average GPU: as much as each of the others
    assert made.rates()["small0"] == pytest.approx(0.8)


def test_a_choice_of_numbers_of_gpus() -> None:
    """A job that scales badly takes one GPU where others want the second, and both where nobody does."""
    options = (Option("v", 1, 1.0), Option("v", 2, 1.5))
    one = Job(name="a", options=options)
    cluster = Cluster.parse("v:2")
    assert allocate(Policy(name="fair"), [one], cluster).rates() == pytest.approx({"a": 1.5})
    two = [one, Job(name="b", options=options)]
    assert allocate(Policy(name="fair"), two, cluster).rates() == pytest.approx({"a": 1.0, "b": 1.0})


def test_blind_policies_spread_jobs_over_kinds() -> None:
    jobs = jobs_of(*GAVEL, kinds="vk")
    made = allocate(Policy(name="fair", blind=True), jobs, TWO)
    for share in made.shares:
        assert share.time == pytest.approx(1 / 3)
    assert levels(made, jobs, TWO) == pytest.approx([2 / 3] * 3)


@pytest.mark.parametrize("name", POLICIES)
def test_jobs_that_are_equal_get_the_same(name: str) -> None:
    jobs = jobs_of(*[(3.0, 1.0)] * 3, kinds="vk", work=(1e4,) * 3, arrived=(1.0,) * 3)
    made = allocate(Policy(name=name), jobs, TWO)
    if name in ("fair", "hierarchical", "finish_time", "makespan", "throughput", "cost"):
        assert len({round(rate, 6) for rate in made.rates().values()}) == 1
    assert all(made.gpus().get(kind.name, 0.0) <= kind.gpus + 1e-6 for kind in TWO.kinds)


def test_nobody_there() -> None:
    assert allocate(Policy(name="fair"), [], TWO) == Allocation(())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Policy(name="fare"), "'fare' is no policy; these are: fair, hierarchical"),
        (lambda: Policy(name="fair", budget=3.0), "budget has no effect with the policy fair; it is for makespan"),
        (lambda: Policy(name="cost", blind=True), "remove blind"),
        (lambda: Group(inside="lifo"), "a group has weight 1.0 and is 'lifo' inside"),
        (lambda: Cluster.parse("v:1,v:2"), "kinds are .*; there must be some, each once"),
        (lambda: Cluster.parse("v"), "'v' is no kind of GPU; write KIND:COUNT or KIND:COUNT@PRICE"),
        (lambda: Option("v", 0, 1.0), "v: a job runs on 0 GPUs"),
        (lambda: Option("v", 1, float("nan")), "the rate is nan"),
        (lambda: Job(name="a", options=(), weight=0.0), "job a: its weight is 0.0"),
        (lambda: allocate(Policy(name="fair"), jobs_of((1.0,), kinds="x"), TWO), "job 0 can run nowhere here: .* x x1"),
        (lambda: allocate(Policy(name="fair"), jobs_of((1.0,), kinds="v") * 2, TWO), "two jobs have one name"),
        (
            lambda: allocate(Policy(name="makespan"), jobs_of((1.0,), kinds="v"), TWO),
            "makespan needs to know how much work is left, which nobody has said of 0",
        ),
        (
            lambda: allocate(Policy(name="cost"), jobs_of((1.0,), kinds="v", deadline=(9.0,)), TWO),
            "job 0 has a deadline, but nobody has said how much work is left",
        ),
    ],
)
def test_what_cannot_work_is_an_error(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_without_scipy_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name.startswith("scipy"):
            raise ImportError(name)
        return stock(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ConfigError, match=r"policies need scipy, which is not installed: pip install 'fold3d\[cluster\]'"
    ):
        allocate(Policy(name="fair"), jobs_of((1.0,), kinds="v"), TWO)
