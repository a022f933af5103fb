"""Split backwards on real processes: losses, norms and weights are those of one process, and DP.sync waits for W."""

from __future__ import annotations

from pathlib import Path

import pytest

from fold3d import schedule as schedules
from tests.dist.parity_cases import Case
from tests.dist.test_parity import check
from tests.helpers.ranks import RankPool
from tests.schedule.cases import split_backwards

pytestmark = pytest.mark.dist

CASES = [
    Case(pp=4, m=8, schedule="zb_h1", family="llama"),
    Case(dp=2, pp=2, m=5, schedule="zb_h1", recompute=True),
    Case(dp=2, pp=2, m=3, schedule="zb_h1", labels="empty", through="trainer"),
    Case(dp=2, pp=2, m=4, schedule="zb_h1", family="opt", tied=False, frozen=True, transport="c10d"),
    Case(pp=3, m=2, schedule="zb_h1", family="plain", tied=False, dtype="float32", labels="ragged"),
    Case(dp=4, m=3, schedule="zb_h1"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_zb_h1(ranks: RankPool, case: Case) -> None:
    check(ranks, case)


@pytest.mark.parametrize("dp, pp, segments", [(1, 2, 2), (2, 2, 2), (1, 1, 3)])
def test_a_file_with_i_and_w(ranks: RankPool, tmp_path: Path, dp: int, pp: int, segments: int) -> None:
    """Chunks that follow each other on a rank, all Ws at the end of the step."""
    made = split_backwards(schedules.generate("aiao", pp=pp, segments=segments, micro_batches=3))
    schedules.save_csv(made, tmp_path / "split.csv")
    check(ranks, Case(dp=dp, pp=pp, segments=segments, m=3, schedule=str(tmp_path / "split.csv")))
