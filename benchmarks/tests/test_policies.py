"""benchmarks/policies.py on Gavel's published rates, where they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.policies import CLUSTER, DATA, drawn, types_of
from fold3d.cluster.jobs import Cluster
from fold3d.cluster.policies import Policy
from fold3d.cluster.simulate import simulate

pytest.importorskip("scipy", reason="policies need fold3d[cluster]")


@pytest.fixture
def folder() -> Path:
    found = os.environ.get(DATA)
    if not found:
        pytest.skip(f"{DATA} names no folder with gavel_throughputs.json: Gavel's rates are not part of this project")
    return Path(found)


@pytest.mark.parametrize("table", ["simulation", "physical_cluster"])
def test_gavel_s_workload(folder: Path, table: str) -> None:
    """26 types on one GPU; one job of five takes longer than 1000 minutes on a V100, the others 31 at least."""
    types = types_of(folder, table)
    assert len(types) == 26
    jobs = drawn(types, 2000, per_hour=5.6, seed=0)
    minutes = [job.work / job.options[0].rate / 60.0 for job in jobs]
    assert min(minutes) > 31.0 and max(minutes) < 10001.0
    assert 0.17 < sum(one > 1000.0 for one in minutes) / len(jobs) < 0.23
    assert jobs[-1].at / 3600.0 == pytest.approx(2000 / 5.6, rel=0.1)


def test_who_knows_of_kinds_is_faster_on_gavel_s_rates(folder: Path) -> None:
    jobs = drawn(types_of(folder, "simulation"), 150, per_hour=12.0, seed=1)
    aware, blind = (simulate(jobs, Policy(name="fair", blind=blind), Cluster.parse(CLUSTER)) for blind in (False, True))
    assert blind.mean_hours() > 1.2 * aware.mean_hours()
