"""What the planner takes where memory is short, and where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fold3d import ParallelConfig
from fold3d.engine.planning.memory_limit import memory_limit
from fold3d.engine.planning.planner import slow_stages, steps_parts
from fold3d.plan.search import decide
from fold3d.plan.strategy import Constraints
from fold3d.topology import Topology
from tests.plan.jobs import evaluate, make_job


def test_gathers_are_early_as_long_as_that_fits() -> None:
    free = decide(make_job(layers=8, micro_batches=4), Constraints(segments=4), bool)
    assert free.strategy.dp_sync == "early"
    least = free.memory_bytes
    enough = decide(make_job(layers=8, micro_batches=4, memory_limit=least), Constraints(segments=4), bool)
    assert enough.strategy.dp_sync == "early" and enough.memory_bytes <= least
    early = evaluate(make_job(layers=8, micro_batches=4), Constraints(segments=4, dp_sync="early"))
    job = make_job(layers=8, micro_batches=4, memory_limit=early.memory_bytes * 9 // 10)
    short = decide(job, Constraints(segments=4), lambda: True)
    assert short.strategy.dp_sync in ("mixed", "zero1") and short.memory_bytes <= early.memory_bytes * 9 // 10
    whole = decide(job, Constraints(segments=4), lambda: False)
    assert whole.strategy.dp_sync == "early" and "nothing that was tried fits" in whole.table


def test_what_the_user_fixed_stays() -> None:
    job = make_job(layers=8, micro_batches=4, memory_limit=1)
    assert decide(job, Constraints(segments=4, dp_sync="early"), lambda: True).strategy.dp_sync == "early"


def _unmakeable(_: Any) -> torch.optim.Optimizer:
    raise KeyError("layers.0.weight")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (None, True),
        (torch.optim.AdamW, True),
        (torch.optim.SGD, True),
        (torch.optim.Adafactor, False),
        (torch.optim.LBFGS, False),
        (_unmakeable, True),
    ],
)
def test_zero1_is_planned_for_optimizers_that_can_do_it(make: Callable[..., Any] | None, expected: bool) -> None:
    assert steps_parts(make) is expected


def test_host_memory_is_limited_by_the_user_only() -> None:
    cpu = torch.device("cpu")
    assert memory_limit(ParallelConfig(), cpu) is None
    assert memory_limit(ParallelConfig(memory_limit=12345), cpu) == 12345


def test_stages_on_slow_hosts_are_told_apart() -> None:
    topology = Topology(dp=2, pp=2, rank=0)
    even = [("a", 1.0), ("a", 1.3), ("b", 1.1), ("b", 0.9)]  # a host's ranks differ by what else it does
    assert slow_stages(topology, even) == ()
    assert slow_stages(topology, [("a", 1.0), ("b", 2.0), ("a", 1.0), ("b", 2.0)]) == (1 / 1.5, 2 / 1.5)
    assert slow_stages(topology, [("a", 1.0), ("a", 1.0), ("b", 2.0), ("b", 2.0)]) == (2 / 1.5, 2 / 1.5)
    assert slow_stages(topology, [("a", None)] * 4) == ()
