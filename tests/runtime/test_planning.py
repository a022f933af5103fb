"""What the planner takes where memory is short, and where it is not."""

from __future__ import annotations

from fold3d.plan.job import Fixed
from fold3d.runtime.planning import _search
from tests.plan.jobs import evaluate, make_job


def test_gathers_are_early_as_long_as_that_fits() -> None:
    free = _search(make_job(layers=8, micro_batches=4), Fixed(segments=4))
    assert free.dp_sync == "early"
    least = free.memory_bytes
    enough = _search(make_job(layers=8, micro_batches=4, memory_limit=least), Fixed(segments=4))
    assert enough.dp_sync == "early" and enough.memory_bytes <= least
    early = evaluate(make_job(layers=8, micro_batches=4), Fixed(segments=4, dp_sync="early"))
    short = _search(make_job(layers=8, micro_batches=4, memory_limit=early.memory_bytes * 9 // 10), Fixed(segments=4))
    assert short.dp_sync in ("mixed", "zero1") and short.memory_bytes <= early.memory_bytes * 9 // 10


def test_what_the_user_fixed_stays() -> None:
    job = make_job(layers=8, micro_batches=4, memory_limit=1)
    assert _search(job, Fixed(segments=4, dp_sync="early")).dp_sync == "early"
