"""With dropout every layout is fold3d on one process: masks depend on (seed, step, global micro-batch, module) only."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from tests.dist import parity_extra, parity_jobs
from tests.dist.parity_cases import Case
from tests.dist.parity_checks import TOLERANCE, assert_equal, assert_ranks_agree
from tests.helpers.ranks import RankPool

CASES = [
    Case(pp=2, m=4, dropout=0.1),
    Case(pp=4, segments=2, m=4, schedule="interleaved", layers=8, dropout=0.1, recompute=True),
    Case(dp=2, pp=2, segments=2, m=2, schedule="aiao", dropout=0.1, recompute=True, transport="c10d"),
    Case(dp=4, m=1, dropout=0.1),
    Case(segments=4, m=4, schedule="fold", group_size=2, dropout=0.1, recompute=True),
    Case(pp=3, segments=1, m=5, schedule="gpipe", family="opt", dropout=0.2, tied=False, dtype="float32"),
    Case(dp=2, pp=2, m=3, family="llama", dropout=0.2, tied=False, recompute=True, labels="padded"),
    Case(dp=2, pp=1, segments=2, m=3, schedule="aiao", family="plain", dropout=0.1, tied=False),
    Case(pp=4, m=6, family="plain", dropout=0.1, recompute=True, dtype="float32"),
    Case(dp=2, pp=2, segments=2, m=2, schedule="interleaved", dropout=0.1, through="trainer"),
    Case(pp=2, segments=2, m=4, schedule="aiao", dropout=0.1, through="trainer", recompute=True),
    Case(dp=2, pp=2, m=3, schedule="zb_h1", dropout=0.1),
    Case(dp=2, pp=2, segments=2, m=3, schedule="zb_v", dropout=0.1, recompute=True),
    Case(pp=3, m=4, schedule="zb_h1", family="llama", dropout=0.2, tied=False, recompute=True),
]


@functools.cache
def one_process(pool: RankPool, case: Case) -> parity_jobs.Result:
    """Returns fold3d's result on one rank."""
    result: parity_jobs.Result = pool.run(parity_jobs.train, 1, case, timeout=150.0)[0]
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_layout(ranks: RankPool, case: Case) -> None:
    results = ranks.run(parity_jobs.train, case.ranks, case, timeout=150.0)
    alone = replace(case.alone(), through=case.through)
    expected = one_process(ranks, alone)
    assert_equal(results[0], expected, TOLERANCE[case.dtype])
    assert_ranks_agree(results, case)
    without = one_process(ranks, replace(alone, dropout=0.0))
    assert abs(expected.losses[0] - without.losses[0]) > 1e-4, "dropout must do something"


def test_recompute_on_one_process(ranks: RankPool) -> None:
    case = Case(m=4, dropout=0.1)
    assert_equal(one_process(ranks, replace(case, recompute=True)), one_process(ranks, case), 1e-12)


@pytest.mark.gate
def test_masks_differ_over_micro_batches_replicas_and_steps(ranks: RankPool) -> None:
    case = Case(dp=2, pp=2, m=3, dropout=0.1)
    shares = [loss for rank in ranks.run(parity_extra.shares_of_equal_rows, 4, case) for loss in rank]
    assert len(shares) == 2 * 2 * 3, "the last stages of two replicas, two steps, three micro-batches"
    assert len(set(shares)) == len(shares)
    still = [x for rank in ranks.run(parity_extra.shares_of_equal_rows, 4, replace(case, dropout=0.0)) for x in rank]
    assert len({round(x, 9) for x in still[:3]}) == 1, "without dropout equal rows have equal losses"


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize(
    "case",
    [
        Case(segments=2, m=2, schedule="aiao", dropout=0.1),
        Case(pp=2, segments=2, m=2, schedule="aiao", dropout=0.1, recompute=True),
        Case(tp=2, m=2, dropout=0.1, tp_overlap="sub"),
        Case(tp=2, pp=2, m=2, family="llama", tied=False, dropout=0.1, sequence_parallel=True),
        Case(tp=2, m=2, family="opt", dropout=0.1, micro_batch_size=1),
    ],
    ids=lambda case: case.name,
)
def test_forwards_in_training_mode(ranks: RankPool, case: Case) -> None:
    """They drop out alike in every layout, and each by masks of its own."""
    plain = replace(case, tp=1, pp=1, segments=1, tp_overlap="auto", sequence_parallel="auto")
    (expected,) = ranks.run(parity_extra.forwards_in_training_mode, 1, replace(plain, micro_batch_size=None))
    assert abs(expected[0] - expected[1]) > 1e-4
    for found in ranks.run(parity_extra.forwards_in_training_mode, case.ranks, case, timeout=150.0):
        assert found == pytest.approx(expected, abs=1e-11)


def test_replicas_forwards_in_training_mode(ranks: RankPool) -> None:
    case = Case(dp=2, m=2, dropout=0.1)
    results = ranks.run(parity_extra.forwards_in_training_mode, 2, case)
    assert len({round(loss, 9) for result in results for loss in result}) == 6


BEGINS = [
    Case(m=2, family="plain", tied=False, micro_batch_size=1),
    Case(m=2, family="plain", tied=False, micro_batch_size=1, recompute=True),
    Case(tp=2, m=2, family="plain", tied=False, tp_overlap="none", sequence_parallel=True, recompute=True),
    Case(tp=2, m=2, family="plain", tied=False, tp_overlap="sub", sequence_parallel=False, recompute=True),
    Case(tp=2, m=2, family="plain", tied=False, tp_overlap="sub", sequence_parallel=True),
]


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("case", BEGINS, ids=lambda case: case.name)
def test_a_block_that_begins_to_draw(ranks: RankPool, case: Case) -> None:
    """By an attribute, which is seen; in another way, which is said."""
    alone = Case(m=2, family="plain", tied=False)
    ((expected, said),) = ranks.run(parity_extra.annealed, 1, alone, unseen=False)
    assert not said
    for found, said in ranks.run(parity_extra.annealed, case.ranks, case, unseen=False, timeout=150.0):
        assert found == pytest.approx(expected, abs=1e-11) and "begins to draw" not in said
    for found, said in ranks.run(parity_extra.annealed, case.ranks, case, unseen=True, timeout=150.0):
        assert found[:2] == pytest.approx(expected[:2], abs=1e-11) and "begins to draw" in said


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("layout", [{"tp_overlap": "none", "sequence_parallel": False}, {"tp_overlap": "sub"}], ids=str)
@pytest.mark.parametrize(("family", "name"), [("gpt2", "attn_dropout"), ("gpt2", "resid_dropout"), ("bert", "dropout")])
def test_chances_that_change(ranks: RankPool, layout: dict[str, Any], family: str, name: str) -> None:
    """A dropout with a chance of 0 draws nothing, and those behind it draw what they drew."""
    case = Case(m=2, family=family, tied=False, dropout=0.1)
    (expected,) = ranks.run(parity_extra.changing_chances, 1, case, name)
    for found in ranks.run(parity_extra.changing_chances, 2, replace(case, tp=2, **layout), name, timeout=150.0):
        assert found == pytest.approx(expected, abs=1e-11)


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize(
    "case",
    [
        Case(segments=2, m=2, schedule="aiao", family="plain", tied=False),
        Case(pp=2, m=2, family="plain", tied=False, recompute=True),
        Case(tp=2, m=2, family="plain", tied=False),
    ],
    ids=lambda case: case.name,
)
def test_evaluations_that_draw(ranks: RankPool, case: Case) -> None:
    """In front of the blocks and behind them it is the same noise, on all processes."""
    (expected,) = ranks.run(parity_extra.noisy_evaluations, 1, Case(m=2, family="plain", tied=False))
    assert len({round(loss, 9) for loss in expected}) == 3
    for found in ranks.run(parity_extra.noisy_evaluations, case.ranks, case, timeout=150.0):
        assert found == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("sequence", [False, True])
def test_dropouts_that_train_in_blocks_that_do_not(ranks: RankPool, sequence: bool) -> None:
    case = Case(m=2, family="bert", tied=False, dropout=0.1)
    (expected,) = ranks.run(parity_extra.training_parts, 1, case)
    assert abs(expected - ranks.run(parity_extra.training_parts, 1, replace(case, dropout=0.0))[0]) > 1e-4
    for found in ranks.run(parity_extra.training_parts, 2, replace(case, tp=2, sequence_parallel=sequence)):
        assert found == pytest.approx(expected, abs=1e-11)


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize(
    ("kind", "case", "refused"),
    [
        ("method", Case(tp=2, m=2, tp_overlap="none", sequence_parallel=True), ""),
        ("alpha", Case(tp=2, m=2, tp_overlap="none", sequence_parallel=True), "by alpha_dropout"),
        ("shared", Case(m=2, micro_batch_size=1), ""),
        ("shared", Case(tp=2, m=2, tp_overlap="sub", sequence_parallel=False), ""),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else value,
)
def test_draws_of_other_kinds(ranks: RankPool, kind: str, case: Case, refused: str) -> None:
    plain = Case(m=2, family="plain", tied=False)
    (expected,) = ranks.run(parity_extra.drawing, 1, plain, kind)
    for found in ranks.run(parity_extra.drawing, case.ranks, replace(case, family="plain", tied=False), kind):
        assert refused in found if refused else found == pytest.approx(expected, abs=1e-11)
