"""What the planner recomputes and offloads under a memory_limit is what runs, and changes no bit of the numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fold3d
from fold3d.config import text_of_bytes
from fold3d.plan.memory import Spared
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case
from tests.helpers.models import Squares, returned_loss
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


class Greedy(Squares):
    """Its last layer wants more memory than there is, of a micro-batch of more than 64 rows."""

    def __init__(self) -> None:
        super().__init__(7)
        self.layers.append(Eighth())


class Eighth(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 64:
            x = x + torch.empty(1 << 60, dtype=torch.uint8)[0]
        return super().forward(x)


def texts_of_a_greedy_step(limit: str | None, evaluates: bool) -> list[str]:
    """Returns what a step, or an evaluation, with larger micro-batches than planned raises: the error and its cause."""
    config = fold3d.ParallelConfig(
        pp=2, micro_batches=4, schedule="gpipe", segments=1, blocks="layers", memory_limit=limit
    )
    engine = fold3d.Engine(Greedy(), config, example={"x": torch.randn(64, 16)})
    engine.run([{"x": torch.randn(64, 16)}] * 4, returned_loss)
    large = {"x": torch.randn(65, 16)}
    try:
        engine.forward(large, returned_loss) if evaluates else engine.run([large] * 4, returned_loss)
    except fold3d.RankError as error:
        return [str(error), type(error.__cause__).__name__]
    finally:
        engine.close()
    return ["nothing"]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("limit", ["1GB", None])
def test_running_out_of_memory_is_explained_on_every_rank(ranks: RankPool, limit: str | None) -> None:
    """torch's allocator refuses what the last stage asks for: all ranks say what was planned, what was measured and
    what would help."""
    (first, _), (last, cause) = ranks.run(texts_of_a_greedy_step, 2, limit, False)
    assert cause == "MemoryError"
    for text in (first, last):
        assert "rank 1" in text and "alloc" in text and "this rank had used" in text, text
        changes = text.partition("the cheapest ways to need less:")[2].splitlines()[1:]
        if limit is None:
            assert "nothing was planned" in text
            assert any("recompute=" in one for one in changes) and "memory_limit" in changes[-1]
        else:
            assert re.search(r"planned were [\d.]+ kB", text)
            assert len(changes) == 3 and all(re.search(r"[\d.]+ kB, a step takes [+-]\d+ %", one) for one in changes)


def test_an_evaluation_that_runs_out_of_memory_names_its_batch(ranks: RankPool) -> None:
    for text, _ in ranks.run(texts_of_a_greedy_step, 2, "1GB", True):
        assert "an evaluation" in text and "this rank had used" in text and "per_device_eval_batch_size" in text, text


def test_a_step_that_needs_more_than_planned_warns_before_the_next(caplog: pytest.LogCaptureFixture) -> None:
    config = fold3d.ParallelConfig(
        micro_batches=4, segments=2, schedule="aiao", blocks="layers", memory_limit="400kB", recompute="none"
    )
    engine = fold3d.Engine(Squares(8), config, example={"x": torch.randn(64, 16)})
    planned = engine.planned_memory
    assert planned is not None and planned < 0.9 * 400_000
    for rows in (64, 64, 128, 64, 64):
        engine.run([{"x": torch.randn(rows, 16)} for _ in range(4)], returned_loss)
    engine.close()
    [warning] = [record.getMessage() for record in caplog.records if "% of 400 kB" in record.getMessage()]
    assert warning.startswith("rank 0 (") and f"planned were {text_of_bytes(planned)};" in warning
    assert "the cheapest ways to need less:" in warning and 'recompute="' in warning
