"""Rounds: what is received comes to what is due; leases extend; a move must pay."""

from __future__ import annotations

import random

import pytest

from fold3d.cluster.jobs import Allocation, Cluster, Job, Option, Place, Share
from fold3d.cluster.rounds import Ledger, Rules, Running, place

KINDS = ("v", "p", "k")
EXAMPLE = ((0.6, 0.4, 0.0), (0.2, 0.6, 0.2), (0.2, 0.0, 0.8))
"""X of the dissertation, 5.3.1 and figure 5.5: three jobs on a V100, a P100 and a K80."""
NO_FILL = Rules(fill=False)


def shares(times, *, gpus: int = 1) -> Allocation:
    made = [
        Share(Place((str(job),), kind, gpus), (1.0,), time)
        for job, row in enumerate(times)
        for kind, time in zip(KINDS, row, strict=False)
        if time
    ]
    return Allocation(tuple(made))


def jobs_of(count: int, *rates: float, gpus: int = 1) -> list[Job]:
    options = tuple(Option(kind, gpus, rate) for kind, rate in zip(KINDS, rates or (3.0, 2.0, 1.0), strict=False))
    return [Job(name=str(number), options=options) for number in range(count)]


def rounds(
    allocation: Allocation, jobs: list[Job], cluster: Cluster, count: int, rules: Rules = NO_FILL, move: float = 0.0
):
    """Holds rounds; returns the seconds that each place was used, and how often a job moved."""
    ledger, used, moves = Ledger(), dict[Place, float](), 0
    running: dict[str, Running] = {}
    for _ in range(count):
        placed = place(allocation, jobs, cluster, ledger, running, rules)
        ledger.enter(allocation, placed, rules.seconds)
        for here in set(placed.values()):
            used[here] = used.get(here, 0.0) + rules.seconds
        stays = {name for name, here in placed.items() if name in running and running[name].place == here}
        moves += len(placed) - len(stays)
        running = {
            name: Running(here, (running[name].seconds if name in stays else 0.0) + rules.seconds, move)
            for name, here in placed.items()
        }
    return used, moves


def test_the_example_of_figure_5_5() -> None:
    """After ten rounds each job has been on each GPU as often as tenths are due to it, up to one round."""
    cluster = Cluster.parse("v:1,p:1,k:1")
    used, _ = rounds(shares(EXAMPLE), jobs_of(3), cluster, 10)
    for job, row in enumerate(EXAMPLE):
        for kind, time in zip(KINDS, row, strict=True):
            assert abs(used.get(Place((str(job),), kind, 1), 0.0) / 360.0 - 10 * time) <= 1.0


@pytest.mark.parametrize("seed", range(6))
def test_what_is_received_comes_to_what_is_due(seed: int) -> None:
    """Random allocations that fit, of jobs on one GPU: after 300 rounds within 2 % of all time."""
    chance = random.Random(seed)
    count = chance.randint(3, 8)
    cluster = Cluster.parse("v:2,p:1,k:2")
    left = {"v": 2.0, "p": 1.0, "k": 2.0}
    times = []
    for _ in range(count):
        row, mine = [], 1.0
        for kind in KINDS:
            time = min(mine, left[kind], chance.choice([0.0, chance.random()]))
            mine, left[kind] = mine - time, left[kind] - time
            row.append(time)
        times.append(tuple(row))
    used, _ = rounds(shares(times), jobs_of(count), cluster, 300)
    for job, row in enumerate(times):
        for kind, time in zip(KINDS, row, strict=True):
            assert used.get(Place((str(job),), kind, 1), 0.0) / (300 * 360.0) == pytest.approx(time, abs=0.02)


def test_large_jobs_do_not_starve() -> None:
    """Four jobs on one GPU each and one on four take turns, on four GPUs."""
    cluster = Cluster.parse("v:4")
    jobs = [Job(name="big", options=(Option("v", 4, 1.0),)), *jobs_of(4)]
    made = Allocation(
        (Share(Place(("big",), "v", 4), (1.0,), 0.5), *[Share(Place((str(k),), "v", 1), (1.0,), 0.5) for k in range(4)])
    )
    used, _ = rounds(made, jobs, cluster, 20)
    assert used[Place(("big",), "v", 4)] == pytest.approx(10 * 360.0, abs=360.0)


def test_a_lease_extends_when_nothing_changes() -> None:
    cluster = Cluster.parse("v:2,k:1")
    _, moves = rounds(shares([(1.0,), (1.0,), (0.0, 0.0, 1.0)]), jobs_of(3), cluster, 50)
    assert moves == 3, "each starts once"


def test_moves_take_no_more_than_the_part_of_the_time_that_they_may() -> None:
    """Two jobs share two GPUs by halves: free moves happen in every round; if one takes 90 s, every 1800 s at most."""
    cluster, halves = Cluster.parse("v:1,k:1"), shares([(0.5, 0.0, 0.5), (0.5, 0.0, 0.5)])
    _, free = rounds(halves, jobs_of(2), cluster, 100)
    used, dear = rounds(halves, jobs_of(2), cluster, 100, move=90.0)
    assert free >= 198 and 2 * 15 <= dear <= 2 * 21
    for here, seconds in used.items():
        assert seconds == pytest.approx(50 * 360.0, abs=5 * 360.0), here


def test_a_move_must_pay() -> None:
    """A job runs where it makes 3 a second. It moves for 3.5, but not for 3.1: 27 of 540 s are lost."""
    cluster = Cluster.parse("v:1,p:1")
    both = shares([(0.1, 0.9)])
    here, there = Place(("0",), "v", 1), Place(("0",), "p", 1)
    for rate, expected in ((3.1, here), (3.5, there)):
        running = {"0": Running(here, 1e6, 27.0)}
        assert place(both, jobs_of(1, 3.0, rate), cluster, Ledger(), running, Rules()) == {"0": expected}
    # One that has just come stays in any case, and one whose place goes to another moves in any case.
    assert place(both, jobs_of(1, 3.0, 9.0), cluster, Ledger(), {"0": Running(here, 360.0, 27.0)}, Rules()) == {
        "0": here
    }
    crowded = shares([(0.1, 0.9), (1.0, 0.0)])
    found = place(crowded, jobs_of(2, 3.0, 1.0), cluster, Ledger(), {"0": Running(here, 1e6, 27.0)}, Rules())
    assert found == {"0": there, "1": Place(("1",), "v", 1)}


def test_what_is_left_over_is_filled_or_not() -> None:
    cluster, one = Cluster.parse("v:1,k:1"), shares([(1.0,)])
    assert place(one, jobs_of(2), cluster, Ledger(), {}, Rules()).keys() == {"0", "1"}
    assert place(one, jobs_of(2), cluster, Ledger(), {}, NO_FILL).keys() == {"0"}


def test_pairs_run_together_and_nowhere_else() -> None:
    cluster = Cluster.parse("v:2")
    pair = Place(("0", "1"), "v", 1)
    made = Allocation((Share(pair, (1.0, 1.0), 0.9), Share(Place(("0",), "v", 1), (2.0,), 0.1)))
    used, _ = rounds(made, jobs_of(2), cluster, 40)
    assert used[pair] == pytest.approx(36 * 360.0, abs=360.0)
    assert sum(used.values()) == pytest.approx(40 * 360.0)


def test_probes_come_first() -> None:
    cluster = Cluster.parse("v:1,k:1")
    probe = Place(("0",), "k", 1)
    assert place(shares([(1.0,)]), jobs_of(1), cluster, Ledger(), {}, Rules(), {"0": probe}) == {"0": probe}


def test_what_is_done_is_forgotten() -> None:
    ledger, made = Ledger(), shares([(0.5,), (0.5,)])
    ledger.enter(made, {"0": Place(("0",), "v", 1)}, 360.0)
    assert ledger.debts == {Place(("0",), "v", 1): -180.0, Place(("1",), "v", 1): 180.0}
    ledger.forget("0")
    assert list(ledger.debts) == [Place(("1",), "v", 1)] and not ledger.received
