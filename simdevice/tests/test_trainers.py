"""Training by fold3d.Trainer on the simulated device: evaluations, checkpoints and what goes on from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dist.parity_cases import Case
from tests.helpers.ranks import RankPool

TRAINERS = "simdevice.tests.trainers"
PP = Case(pp=2, m=3)
FOLD = Case(pp=2, m=4, segments=2, schedule="fold", labels="padded")
ZERO1 = Case(dp=2, m=2, segments=2, schedule="aiao", dp_sync="zero1")


def check(case: Case, pool: RankPool) -> None:
    assert min(pool.run(f"{TRAINERS}:resumed", case.ranks, case, timeout=200.0)) > 1000


@pytest.mark.parametrize(
    "case",
    [PP, FOLD, replace(ZERO1, dtype="float32"), replace(ZERO1, dp_sync="early", labels="ragged")],
    ids=lambda case: case.name,
)
def test_it_evaluates_saves_and_goes_on_with_the_bits_of_the_cpu(case: Case, sim_ranks: RankPool) -> None:
    check(case, sim_ranks)


@pytest.mark.parametrize("dp_sync", ["early", "zero1"])
def test_stages_and_replicas(dp_sync: str, sim_ranks4: RankPool) -> None:
    check(Case(dp=2, pp=2, m=3, segments=2, schedule="aiao", dp_sync=dp_sync), sim_ranks4)
