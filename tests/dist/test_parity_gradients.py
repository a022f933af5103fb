"""Gradients that are missing, frozen, rounded to bfloat16, or come from fewer micro-batches than the others."""

from __future__ import annotations

import pytest

from tests.dist import parity_extra, parity_jobs
from tests.dist.parity_cases import LENGTH, ROWS, Case
from tests.dist.parity_checks import TOLERANCE, assert_equal, assert_ranks_agree
from tests.helpers import data
from tests.helpers.ranks import RankPool

FUSSY = [
    Case(m=4),
    Case(pp=2, m=4, transport="c10d"),
    Case(pp=4, m=4),
    Case(dp=2, pp=2, m=2),
    Case(dp=2, pp=2, segments=2, m=2, schedule="aiao", recompute=True),
    Case(dp=4, m=1),
]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("case", FUSSY, ids=lambda case: case.name)
@pytest.mark.parametrize("recorded", ["short", "long"])
@pytest.mark.parametrize("attached", [True, False])
def test_parameters_without_gradient(ranks: RankPool, case: Case, recorded: str, attached: bool) -> None:
    """`.grad` stays None on every rank exactly where it does in one process, and AdamW leaves such weights alone.

    Some parameters get a gradient from one micro-batch only, so on one replica only; one never gets any.
    """
    found = ranks.run(parity_extra.fussy, case.ranks, case, 3 if recorded == "long" else 0, attached, timeout=150.0)
    expected, without = parity_extra.fussy_alone(case.total)
    rare = {"shift", *(f"layers.{block}.gain" for block in range(4))}
    assert [names & rare for names in without] == [rare, set(), rare, set(), rare]
    for _, rank_without, held in found:
        if case.dp == 1 or not attached:  # else gradients of replicas are not in `.grad`
            assert rank_without == [names & held for names in without]
    results = [result for result, _, _ in found]
    assert_equal(results[0], expected, 1e-10)
    assert_ranks_agree(results, case)
    unused = parity_extra.fussy_model().unused
    assert results[0].weights["unused"].equal(unused), "weight decay must not touch what has no gradient"


FROZEN = [
    Case(pp=2, m=3, frozen=True),
    Case(pp=4, m=4, frozen=True, tied=False, layers=8),
    Case(dp=2, pp=2, segments=2, m=2, schedule="aiao", frozen=True, recompute=True),
    Case(pp=2, segments=2, m=5, schedule="interleaved", frozen=True, family="opt", dtype="float32", labels="padded"),
    Case(dp=3, m=2, frozen=True, family="llama", tied=False),
    Case(dp=2, pp=2, m=2, frozen=True, family="plain", tied=True, transport="c10d"),
    Case(dp=2, pp=2, m=2, frozen=True, through="trainer"),
    Case(pp=4, m=2, frozen=True, through="trainer", recompute=True, tied=False, layers=8),
]


@pytest.mark.parametrize("case", FROZEN, ids=lambda case: case.name)
def test_frozen_parameters(ranks: RankPool, case: Case) -> None:
    results = ranks.run(parity_jobs.train, case.ranks, case, timeout=150.0)
    assert_equal(results[0], parity_jobs.train_alone(case.alone()), TOLERANCE[case.dtype])
    assert_ranks_agree(results, case)
    before = parity_jobs.build(case)
    frozen = [name for name, parameter in before.named_parameters() if not parameter.requires_grad]
    assert frozen and all(results[0].weights[name].equal(before.get_parameter(name)) for name in frozen)


def test_stage_without_trainable_parameters(ranks: RankPool) -> None:
    """The optimizer of such a stage has nothing to do; the user's maker of optimizers need not know."""
    case = Case(pp=4, m=2, frozen=True, tied=False, layers=8)
    found = ranks.run(parity_extra.frozen_stage, 4, case)
    assert found[0] == found[3] and found[0][1] < found[0][0]


# bfloat16 keeps 8 bits: a rounding is up to 2^-8 = 0.4 % of a value, and gradients of single micro-batches are added in
# another order (over replicas) than in one process. The loss of the first step has no such history: each micro-batch's
# forward is the same operations on the same numbers.

ROUNDED = [
    Case(pp=2, m=2, dtype="float32", through="trainer"),
    Case(dp=2, pp=2, segments=2, m=2, schedule="aiao", dtype="float32", through="trainer", recompute=True),
    Case(dp=2, m=2, dtype="float32", family="llama", tied=False, through="trainer"),
]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_bf16_autocast(ranks: RankPool, case: Case) -> None:
    results = ranks.run(parity_jobs.train, case.ranks, case, bf16=True, timeout=150.0)
    expected = parity_jobs.train_alone(case.alone(), bf16=True)
    assert abs(results[0].losses[0] - expected.losses[0]) <= 1e-6
    assert_equal(results[0], expected, 5e-4)
    assert_ranks_agree(results, case)
    full = parity_jobs.train_alone(case.alone())
    assert abs(expected.losses[0] - full.losses[0]) > 1e-5, "autocast must do something"


@pytest.mark.parametrize("case", [Case(**layout, dtype="bfloat16") for layout in (
    {"pp": 2, "m": 2},
    {"dp": 2, "pp": 2, "segments": 2, "m": 2, "schedule": "aiao", "recompute": True},
    {"dp": 2, "m": 2, "family": "opt", "through": "trainer"},
)], ids=lambda case: case.name)  # fmt: skip
def test_bf16_parameters(ranks: RankPool, case: Case) -> None:
    results = ranks.run(parity_jobs.train, case.ranks, case, timeout=150.0)
    expected = parity_jobs.train_alone(case.alone())
    assert abs(results[0].losses[0] - expected.losses[0]) <= 1e-6
    assert_equal(results[0], expected, 1e-2)
    assert_ranks_agree(results, case)


UNEVEN = [
    # rows; the epoch's last step has fewer micro-batches, and with one replica its last micro-batch one row
    (Case(pp=2, m=3, through="trainer"), (2 * 3 + 1) * ROWS + 1),
    (Case(pp=2, segments=2, m=4, schedule="fold", group_size=3, through="trainer"), (4 + 1) * ROWS),
    (Case(dp=2, pp=2, segments=2, m=3, schedule="aiao", through="trainer"), (6 + 2) * ROWS),
    (Case(dp=2, m=3, through="trainer", family="opt", labels="padded"), (6 + 4) * ROWS),
    (Case(pp=3, m=4, through="trainer", dtype="float32", clip=False), 4 * ROWS + 1),
]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("case, count", UNEVEN, ids=[f"{case.name}-{count}rows" for case, count in UNEVEN])
def test_uneven_last_batch(ranks: RankPool, case: Case, count: int) -> None:
    rows = data.dataset(count, LENGTH, ragged=True, padded=case.labels == "padded")
    epochs = {"max_steps": -1, "num_train_epochs": 2}
    results = ranks.run(parity_jobs.train, case.ranks, case, rows=rows, timeout=150.0, **epochs)
    expected = parity_jobs.train_alone(case.alone(), rows=rows, **epochs)
    assert len(expected.losses) == 2 * -(-count // (case.total * ROWS))
    assert_equal(results[0], expected, TOLERANCE[case.dtype])
    assert_ranks_agree(results, case)
