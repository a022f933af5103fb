"""The simulator on cases that can be worked out, and what it is for: policies that differ."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fold3d.cluster import workload
from fold3d.cluster.jobs import Cluster, Option
from fold3d.cluster.policies import Policy
from fold3d.cluster.rounds import Rules
from fold3d.cluster.simulate import simulate
from fold3d.cluster.workload import Arrival
from fold3d.errors import ConfigError

pytest.importorskip("scipy", reason="policies need fold3d[cluster]")

FAIR = Policy(name="fair")
ONE = Cluster.parse("v:1@3.6")


def arrival(name: str, work: float, at: float = 0.0, **more) -> Arrival:
    return Arrival(**{"name": name, "at": at, "work": work, "options": (Option("v", 1, 1.0),), **more})


def test_one_job_alone() -> None:
    report = simulate([arrival("a", 1000.0, at=50.0)], FAIR, ONE)
    (job,) = report.jobs
    assert (job.arrived, job.finished, job.moves, job.late) == (50.0, 1050.0, 0, False)
    assert job.fairness == pytest.approx(1.0)
    assert report.cost == pytest.approx(1000.0 * 3.6 / 3600.0)
    assert report.used == {"v": pytest.approx(1000.0 / 1050.0)} and report.moving == 0.0


def test_two_jobs_take_turns_and_each_takes_twice_as_long() -> None:
    """Six rounds of work each: a runs in rounds 0, 2, .. 10, b in 1, 3, .. 11."""
    report = simulate([arrival("a", 2160.0), arrival("b", 2160.0)], FAIR, ONE)
    assert [job.finished for job in report.jobs] == [11 * 360.0, 12 * 360.0]
    assert report.jobs[0].moves == 5


def test_moves_cost_what_they_take() -> None:
    """20 s to start; then, of each later start, 10 s to save, too. Leases of 30 / 0.05 = 600 s: two rounds."""
    jobs = [arrival(name, 2160.0, save_seconds=10.0, start_seconds=20.0) for name in "ab"]
    report = simulate(jobs, FAIR, ONE)
    assert [job.moves for job in report.jobs] == [3, 3]
    busy = 2 * (2160.0 + 20.0 + 3 * 30.0)
    assert report.moving == pytest.approx(2 * (20.0 + 3 * 30.0) / busy)
    assert report.cost == pytest.approx(busy * 3.6 / 3600.0)
    alone = simulate(jobs[:1], FAIR, ONE).jobs[0]
    assert alone.finished == 2180.0 and alone.moves == 0


def test_a_start_that_takes_longer_than_a_round() -> None:
    assert simulate([arrival("a", 100.0, start_seconds=900.0)], FAIR, ONE).seconds == 1000.0


def test_the_policy_that_knows_of_kinds_is_faster() -> None:
    """Half of the jobs are ten times as fast on one kind, the others hardly: the example that Gavel begins with."""
    cluster = Cluster.parse("v:2,k:2")
    jobs = [
        arrival(str(k), 36000.0, options=(Option("v", 1, 10.0), Option("k", 1, 1.0 if k % 2 else 9.0)))
        for k in range(8)
    ]
    aware, blind = (simulate(jobs, Policy(name="fair", blind=blind), cluster) for blind in (False, True))
    assert blind.mean_hours() > 1.2 * aware.mean_hours()
    for report in (aware, blind):
        assert all(set(used) == {"v", "k"} and used["v"] <= 2 for _, used, _ in report.history)
    assert simulate(jobs, FAIR, cluster) == aware, "the same again"


@pytest.mark.parametrize("wrong", ["v", "p", "k"])
def test_a_wrong_prediction_is_found_in_as_many_rounds_as_there_are_kinds_and_one(wrong: str) -> None:
    """Predicted five times too slow, or too fast, on one kind: then the job stays on what is truly best."""
    true = {"v": 3.0, "p": 2.0, "k": 1.0}
    cluster = Cluster.parse("v:1,p:1,k:1")
    for factor in (0.2, 5.0):
        told = {kind: rate * (factor if kind == wrong else 1.0) for kind, rate in true.items()}
        made = [tuple(Option(kind, 1, rate) for kind, rate in rates.items()) for rates in (true, told)]
        report = simulate([arrival("a", 3.0 * 36000.0, options=made[0], predicted=made[1])], FAIR, cluster)
        kinds = [next(kind for kind, count in used.items() if count) for _, used, _ in report.history]
        assert kinds[4:] == ["v"] * len(kinds[4:]) and len(kinds) > 50
        assert set(kinds[:3]) == {"v", "p", "k"}


def test_only_those_that_are_looked_at_count() -> None:
    jobs = [arrival(str(k), 360.0, at=360.0 * k) for k in range(20)]
    report = simulate(jobs, FAIR, ONE, looked_at=range(5, 8))
    assert [job.name for job in report.jobs] == ["5", "6", "7"] and report.seconds == 8 * 360.0


def test_deadlines_and_cost() -> None:
    """On the cheap GPU the work takes 2e5 s: who is due earlier is on the dear one for a while, the other never."""
    cluster = Cluster.parse("v:1@10,k:1@1")
    options = (Option("v", 1, 2.0), Option("k", 1, 1.0))
    jobs = [arrival("a", 2e5, options=options, deadline=1.5e5), arrival("b", 2e5, options=options)]
    careful, fast = (simulate(jobs, Policy(name=name), cluster) for name in ("cost", "throughput"))
    assert not any(job.late for job in careful.jobs)
    assert careful.cost < 0.8 * fast.cost
    late = simulate([arrival("c", 2000.0, deadline=1000.0)], Policy(name="cost"), Cluster.parse("v:1@1"))
    assert late.jobs[0].late


@pytest.mark.parametrize("name", ["hierarchical", "finish_time", "makespan", "fifo", "shortest"])
def test_every_policy_runs_to_the_end(name: str) -> None:
    options = (Option("v", 1, 3.0), Option("k", 2, 2.0))
    jobs = [arrival(str(k), 3600.0 * (1 + k % 3), at=500.0 * k, options=options, group="ab"[k % 2]) for k in range(8)]
    report = simulate(jobs, Policy(name=name), Cluster.parse("v:1,k:2"))
    assert len(report.jobs) == 8 and all(math.isfinite(job.fairness) for job in report.jobs)
    total = sum(job.work for job in jobs)
    assert report.seconds >= total / 5.0, "not faster than both GPUs together"


FILE = {
    "models": {"m": {"rates": {"v": 2.0, "k:2": 1.0}, "start_seconds": 20}},
    "groups": {"lab": {"weight": 2.0, "inside": "fifo"}},
    "jobs": [
        {"model": "m", "at_hours": 1.0, "hours_on": ["v", 2.0], "group": "lab"},
        {"name": "own", "rates": [{"kind": "v", "gpus": 1, "rate": 4.0}], "work": 100.0, "deadline_hours": 3.0},
    ],
}


def test_a_workload_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(FILE))
    found = workload.read(path)
    own, model = found.jobs
    assert own == Arrival(name="own", at=0.0, work=100.0, options=(Option("v", 1, 4.0),), deadline=3 * 3600.0)
    assert (model.name, model.at, model.work) == ("m-0", 3600.0, 2 * 3600.0 * 2.0)
    assert model.options == (Option("v", 1, 2.0), Option("k", 2, 1.0)) and model.start_seconds == 20.0
    assert found.groups["lab"].inside == "fifo"
    drawn = found.draw(count=400, per_hour=2.0, seed=3)
    assert drawn == found.draw(count=400, per_hour=2.0, seed=3) != found.draw(count=400, per_hour=2.0, seed=4)
    assert len({job.name for job in drawn}) == 400
    assert drawn[-1].at / 3600.0 == pytest.approx(200.0, rel=0.2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"jobs": []}, "has no jobs"),
        ({"jobs": [{"model": "x"}]}, r"jobs\[0\]\.model is 'x'; it must be one of m"),
        ({"jobs": [{"model": "m"}]}, r"jobs\[0\]\.work is missing; say it in the unit of the rates, or"),
        ({"jobs": [{"model": "m", "hours": 1.0}]}, r"jobs\[0\] has 'hours'; known are"),
        (
            {"jobs": [{"model": "m", "hours_on": ["p", 1.0]}]},
            r"hours_on\[0\] is 'p', on which it has no rate; it has v:1, k:2",
        ),
        (
            {"jobs": [{"work": 1.0}]},
            r"jobs\[0\]\.rates is missing; it must be a list of rates with kind, gpus and rate",
        ),
        ({"jobs": [3]}, r"jobs\[0\] is 3; it must be an object"),
        (
            {"jobs": [{"model": "m", "work": 1.0, "predicted": {"v": 2.0, "t4": 1.0}}]},
            "job m-0: a rate is predicted on t4 x1, but it has no true one there",
        ),
        ({"jobs": [{"model": "m", "name": "a", "work": 1.0}] * 2}, "two jobs have one name"),
        ({"groups": {"lab": {"wait": 1}}}, r"groups\.lab has 'wait'; known are weight, inside"),
    ],
)
def test_a_workload_that_cannot_be_read(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(FILE | change))
    with pytest.raises(ConfigError, match=message):
        workload.read(path)
    with pytest.raises(ConfigError, match="cannot be read as a workload"):
        workload.read(tmp_path / "nowhere.json")


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(ConfigError, match="none of the 1 jobs is looked at"):
        simulate([arrival("a", 1.0)], FAIR, ONE, looked_at=range(0))
    with pytest.raises(ConfigError, match="two jobs have the name a"):
        simulate([arrival("a", 1.0)] * 2, FAIR, ONE)
    for here in (Option("v", 1, 1.0), Option("k", 1, 0.0)):
        with pytest.raises(ConfigError, match=r"job a can run nowhere here: .*; there are k x1"):
            simulate([arrival("a", 1.0, options=(here,))], FAIR, Cluster.parse("k:1"))
    for long in (arrival("a", 1.0, start_seconds=math.inf), arrival("a", 1.0, options=(Option("v", 1, 1e-300),))):
        with pytest.raises(ConfigError, match=r"job a takes at least .* rounds of 360 s, and only 200000 are"):
            simulate([long], FAIR, ONE)
    with pytest.raises(ConfigError, match=r"job a takes at least 1e\+09 rounds of 1e-09 s"):
        simulate([arrival("a", 1.0)], FAIR, ONE, Rules(seconds=1e-9))
    with pytest.raises(ConfigError, match="cannot be drawn; both must be positive"):
        workload.Workload((arrival("a", 1.0),), {}).draw(count=0, per_hour=1.0, seed=0)
    with pytest.raises(ConfigError, match=r"5 jobs at 1e-300 an hour come over more than 1e\+06 h"):
        workload.Workload((arrival("a", 1.0),), {}).draw(count=5, per_hour=1e-300, seed=0)
    assert Rules().lease(0.0) == 360.0 and Rules().lease(27.0) == pytest.approx(540.0)
