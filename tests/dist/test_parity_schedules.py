"""Schedules that are not in the array of tests/parity: losses, norms and weights are those of one process."""

from __future__ import annotations

import pytest

from tests.dist.parity_cases import Case
from tests.dist.test_parity import check
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

GATE = [
    Case(pp=4, segments=2, m=5, schedule="zb_v", layers=8),
    Case(pp=3, m=5, schedule="kfkb", group_size=2, family="llama"),
    Case(pp=3, m=5, schedule="shifted_critical_path", recompute=True),
]
CASES = [
    Case(pp=2, segments=2, m=1, schedule="zb_v", family="llama", labels="ragged"),
    Case(dp=2, pp=2, segments=2, m=3, schedule="zb_v", recompute=True),
    Case(dp=2, pp=2, segments=2, m=5, schedule="zb_v", family="opt", tied=False, frozen=True, labels="empty"),
    Case(pp=3, segments=2, m=7, schedule="zb_v", layers=6, transport="c10d"),
    Case(tp=2, pp=2, segments=2, m=4, schedule="zb_v", sequence_parallel=True),
    Case(dp=2, pp=2, segments=2, m=4, schedule="zb_v", through="trainer"),
    Case(segments=2, m=3, schedule="zb_v", family="plain", dtype="float32"),
    Case(pp=2, segments=2, m=4, schedule="zb_v", offload="activations"),
    Case(dp=2, pp=2, m=5, schedule="kfkb", group_size=3, labels="ragged", transport="c10d"),
    Case(pp=2, m=4, schedule="kfkb", through="trainer"),
    Case(dp=2, pp=2, m=4, schedule="shifted_critical_path", recompute=True),
    Case(pp=4, m=4, schedule="shifted_critical_path"),
]


@pytest.mark.gate
@pytest.mark.parametrize("case", GATE, ids=lambda case: case.name)
def test_one_layout(ranks: RankPool, case: Case) -> None:
    check(ranks, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_others(ranks: RankPool, case: Case) -> None:
    check(ranks, case)
