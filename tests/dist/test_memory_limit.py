"""What the planner recomputes and offloads under a memory_limit is what runs, and changes no bit of the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from fold3d.plan.memory.spared import Spared
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

CASES = [
    Case(pp=2, segments=2, m=8, schedule="aiao", dropout=0.1),
    Case(pp=2, m=4, schedule="1f1b", family="llama", tied=False, dtype="bfloat16", dropout=0.1),
    Case(dp=2, pp=2, segments=2, m=6, schedule="aiao", dp_sync="early", labels="padded"),
    Case(m=4, schedule="1f1b", dropout=0.1),
]


@dataclass
class Trained:
    """Of one rank."""

    losses: list[float]
    digests: list[dict[str, str]]
    spared: Spared
    expected: int
    """Bytes that the fullest process was planned to need."""


def train(case: Case, **changes: Any) -> Trained:
    """Trains on one rank, the planner asked."""
    with parity_jobs.precision(case):
        engine = parity_jobs.engine_of(case, **{"offload": "auto", "recompute": "auto", **changes})
        trained = Trained([], [], Spared(), 0)
        for step in range(2):
            out = engine.step(parity_jobs.batch_of(engine, case, step))
            trained.losses.append(out.loss.item())
            trained.digests.append(parity_jobs.digests(engine))
        trained.spared = Spared.of(engine.strategy.settings)
        assert engine.planned_memory is not None
        trained.expected = engine.planned_memory
        engine.close()
        return trained


@pytest.mark.rotating
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_planned_recomputation_changes_no_bit(ranks: RankPool, case: Case) -> None:
    roomy = ranks.run(train, case.ranks, case, memory_limit="1GB")
    assert all(one.spared.nothing for one in roomy)
    least = ranks.run(train, case.ranks, case, memory_limit="1GB", recompute="full")
    limit = int(0.5 * (max(one.expected for one in roomy) + max(one.expected for one in least)))
    short = ranks.run(train, case.ranks, case, memory_limit=limit)
    for one, other in zip(short, roomy, strict=True):
        assert not one.spared.recompute.nothing and one.expected <= limit
        assert one.losses == other.losses and one.digests == other.digests
