"""Divided micro-batches: gradients, losses and masks of dropout are those of whole ones in one process."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.dist import parity_jobs
from tests.dist.parity_cases import Case
from tests.dist.parity_checks import TOLERANCE, assert_equal, assert_ranks_agree
from tests.helpers import data
from tests.helpers.ranks import RankPool

SIZED = functools.partial(Case, micro_batch_size=1)
CASES = [
    SIZED(dp=2, pp=2, m=2, segments=2, schedule="aiao", dropout=0.1, labels="padded"),
    SIZED(pp=2, m=1, family="plain", labels="empty", tied=False),  # a mean over labels, of which one part has none
    SIZED(dp=2, tp=2, m=2, dropout=0.1, labels="ragged", tp_overlap="none"),
    SIZED(pp=2, m=2, segments=2, schedule="aiao", dropout=0.1, recompute="blocks", offload="activations"),
    SIZED(dp=2, pp=2, m=2, dropout=0.1, labels="padded", through="trainer", recompute=True),
    SIZED(dp=2, m=3, family="plain", dropout=0.1, labels="padded", recompute=True),
]


@functools.cache
def one_process(pool: RankPool, case: Case) -> parity_jobs.Result:
    """Returns fold3d's result on one rank, with whole micro-batches."""
    result: parity_jobs.Result = pool.run(parity_jobs.train, 1, case, timeout=150.0)[0]
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_divided_as_whole(ranks: RankPool, case: Case) -> None:
    results = ranks.run(parity_jobs.train, case.ranks, case, timeout=150.0)
    assert_equal(results[0], one_process(ranks, replace(case.alone(), through=case.through)), TOLERANCE[case.dtype])
    assert_ranks_agree(results, case)


PLANNED = [
    Case(pp=2, m=2, dropout=0.1, labels="padded"),
    Case(dp=2, m=2, family="plain", dropout=0.1, labels="padded", dp_sync="early"),
    Case(tp=2, m=2, dropout=0.1, labels="ragged", tp_overlap="none"),
]


def train_planned(case: Case, **changes: object) -> tuple[parity_jobs.Result, int, int]:
    """Called on every rank: returns the numbers, the schedule's micro-batches, and the bytes that were planned."""
    with parity_jobs.precision(case):
        if case.family in parity_jobs.MEAN_LOSSES and "micro_batch_size" in changes:
            changes["loss_reduction"] = "tokens"
        engine = parity_jobs.engine_of(case, **{"offload": "none", "recompute": "auto", **changes})
        result = parity_jobs.Result()
        for step in range(3):
            out = engine.step(parity_jobs.batch_of(engine, case, step))
            result.losses.append(out.loss.item())
            result.norms.append(out.grad_norm.item())
        result.weights = engine.state_dict()["model"]
        assert engine.planned_memory is not None
        found = result, engine.strategy.micro_batches, engine.planned_memory
        engine.close()
        return found


@pytest.mark.parametrize("case", PLANNED, ids=lambda case: case.name)
def test_the_planner_divides_under_a_limit(ranks: RankPool, case: Case) -> None:
    *_, whole = ranks.run(train_planned, case.ranks, case, memory_limit="1GB")[0]
    *_, least = ranks.run(train_planned, case.ranks, case, memory_limit="1GB", micro_batch_size=1)[0]
    limit = (whole + least) // 2
    assert least < limit < whole
    results = ranks.run(train_planned, case.ranks, case, memory_limit=limit, recompute="none", micro_batch_size="auto")
    alone = one_process(ranks, case.alone())
    for result, micro_batches, planned in results:
        assert micro_batches == 2 * case.m and planned <= limit
        assert result.losses == pytest.approx(alone.losses, rel=TOLERANCE[case.dtype])
        assert result.norms == pytest.approx(alone.norms, rel=TOLERANCE[case.dtype])


def losses_with_labels_in_some_rows(dp: int, size: int | None) -> list[float]:
    """Called on every rank: replicas have rows without labels in different places, one of them all but one."""
    case = Case(dp=dp, m=2 // dp, family="plain", tied=False)
    reduction = None if size is None else "tokens"
    engine = parity_jobs.engine_of(case, micro_batch_size=size, loss_reduction=reduction)
    found = []
    for step in range(3):
        rows = data.batch(8, 9, start=100 * step)
        rows["labels"][[1, 4, 5, 7]] = -100
        first = 8 // dp * engine.topology.dp_rank
        out = engine.step({name: value[first : first + 8 // dp] for name, value in rows.items()})
        found += [out.loss.item(), out.grad_norm.item()]
    engine.close()
    return found


def test_replicas_with_different_numbers_of_parts(ranks: RankPool) -> None:
    """Parts without labels are left out where the loss is a mean over labels: here one of 4, and 3 of 4."""
    divided = ranks.run(losses_with_labels_in_some_rows, 2, 2, 1)
    whole = ranks.run(losses_with_labels_in_some_rows, 1, 1, None)[0]
    assert divided[0] == divided[1]
    assert divided[0] == pytest.approx(whole, rel=1e-6)
