"""Products that communicate while they compute: everything is as on one process, to 1e-10 in fp64."""

from __future__ import annotations

import functools

import pytest

from tests.dist import fused_jobs, parity_jobs
from tests.dist.parity_cases import Case
from tests.dist.parity_checks import TOLERANCE, assert_equal, assert_ranks_agree
from tests.helpers.ranks import RankPool

Fused = functools.partial(Case, tp_overlap="fused")

GRID = [
    Fused(tp=2, m=2, family="llama"),
    Fused(tp=2, m=2, family="gpt2", recompute=True, sequence_parallel=True),
    Fused(tp=2, m=2, family="opt", recompute=True),
    Fused(tp=4, m=1, family="llama", sequence_parallel=True, frozen=True),
    Fused(tp=2, pp=2, m=4, family="llama", schedule="zb_h1", sequence_parallel=True),
    Fused(tp=2, pp=2, m=4, family="gpt_neox", schedule="zb_h1"),
    Fused(dp=2, tp=2, m=2, family="bert", transport="c10d", sequence_parallel=True),
    Fused(tp=2, m=2, family="bloom", dropout=0.0),
]


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_training(ranks: RankPool, case: Case) -> None:
    expected = parity_jobs.train_alone(case.alone())
    results = ranks.run(parity_jobs.train, case.ranks, case, timeout=150.0)
    assert_equal(results[0], expected, TOLERANCE[case.dtype])
    assert_ranks_agree(results, case)


@pytest.mark.parametrize(
    "tp, samples, sequence", [(2, 1, False), (2, 1, True), (2, 5, True), (4, 3, False), (4, 1, True)]
)
def test_sums_that_are_cut(ranks: RankPool, tp: int, samples: int, sequence: bool) -> None:
    """Into two pieces and more, of one sample's rows, too, which do not divide."""
    length = 803 // samples
    expected = ranks.run(fused_jobs.losses, 1, 1, samples, length, timeout=150.0)[0]
    assert expected[-1] < 0.95 * expected[0], "the gradients must be felt"
    given = (tp, samples, length, "fused")
    for found in ranks.run(fused_jobs.losses, tp, *given, timeout=150.0, sequence_parallel=sequence):
        assert found == pytest.approx(expected, rel=1e-10)
