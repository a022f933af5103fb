"""Into how many replicas, stages and shards processes are divided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fold3d.errors import ConfigError
from fold3d.plan.job import TrainingJob
from fold3d.plan.search import Found, search_jobs
from fold3d.plan.space.mesh import Mesh, meshes, search_meshes
from fold3d.plan.strategy import Constraints
from tests.plan.jobs import make_job


def test_every_mesh_of_the_same_global_batch_is_tried() -> None:
    found = meshes(8, 8, tp=None, pp=None, ranks_per_host=2, most_stages=4)
    assert [(one.tp, one.pp, one.dp) for one in found] == [
        (1, 1, 8),
        (1, 2, 4),
        (1, 4, 2),
        (2, 1, 4),
        (2, 2, 2),
        (2, 4, 1),
    ]
    assert all(one.dp * one.micro_batches == 8 and one.tp * one.pp * one.dp == 8 for one in found)
    assert {one.tp for one in meshes(8, 8, tp=4, pp=None, ranks_per_host=2, most_stages=4)} == {4}, "asked for"
    assert [one.dp for one in meshes(8, 4, tp=1, pp=None, ranks_per_host=1, most_stages=8)] == [4, 2, 1]
    with pytest.raises(ConfigError, match="7 processes and 8 micro-batches of a step cannot be divided with tp=2"):
        meshes(7, 8, tp=2, pp=None, ranks_per_host=8, most_stages=4)


def job_of(mesh: Mesh, limit: int | None = None) -> TrainingJob:
    """Returns a job whose layers take 1 / tp of the time and memory; five heads cannot be shared by two."""
    if mesh.tp == 4:
        raise ConfigError("5 heads cannot be divided by 4")
    layers = 16 // mesh.pp
    job = make_job(
        dp=mesh.dp, pp=mesh.pp, layers=layers, micro_batches=mesh.micro_batches,
        forward=0.04 * layers * mesh.micro_batches / mesh.tp, backward=0.08 * layers * mesh.micro_batches / mesh.tp,
        gradient_bytes=800_000 * layers // mesh.tp, bandwidth=1e8, memory_limit=limit,
    )  # fmt: skip
    return replace(job, tp=mesh.tp)


def decide(jobs: list[TrainingJob]) -> list[Found]:
    """Returns what is found among few candidates."""
    return search_jobs(jobs, Constraints(segments=1, schedule="1f1b", dp_sync="early", bucket_bytes=1 << 20))


def test_the_fastest_that_fits_is_first_and_what_cannot_be_last() -> None:
    candidates = meshes(4, 8, tp=None, pp=None, ranks_per_host=4, most_stages=4)
    free = search_meshes(candidates, job_of, decide)
    assert free[-1].mesh.tp == 4 and free[-1].reason == "5 heads cannot be divided by 4"
    alone = {one.mesh: decide([job_of(one.mesh)])[0] for one in free[:-1]}
    fastest = min(alone, key=lambda mesh: alone[mesh].proposal().step_ms)
    assert free[0].mesh == fastest and free[0].found is not None and not free[0].reason
    assert free[0].found.proposal() == alone[fastest].proposal()
    times = [one.step_ms for one in free[:-1] if one.step_ms is not None]
    assert times == sorted(times)
    for one in free[:-1]:
        if one.step_ms is None:  # a bound says so
            assert one.reason.startswith("at least") and one.found is not None
            assert free[0].step_ms < one.found.least_ms * 1.001 <= alone[one.mesh].proposal().step_ms * 1.001
    needs = {mesh: found.memory_bytes for mesh, found in alone.items()}
    limit = min(needs.values())
    short = search_meshes(candidates, lambda mesh: job_of(mesh, limit), decide)
    assert short[0].reason == "" and needs[short[0].mesh] == limit
    assert {one.mesh for one in short} == {one.mesh for one in free}
    nothing = search_meshes(candidates, lambda mesh: job_of(mesh, 1), decide)
    assert {one.reason for one in nothing[:-2]} == {"does not fit into memory_limit"}
    sizes = [one.found.memory_bytes for one in nothing if one.found is not None]
    assert sizes == sorted(sizes)
